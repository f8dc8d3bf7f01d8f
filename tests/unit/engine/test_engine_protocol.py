"""The event protocol, judged by happens-before on random training programs.

The simulated machine runs its queues as a seeded adversary likes and hands freed addresses out at once.
A program that plain autograd runs without a race must have none here, through the CUDA backend's
recorded driver calls; and leaving out any rule must show.
"""

from __future__ import annotations

import itertools

import pytest
import sim

#: The programs here tell the allocator of every use; tests/unit/sim_device leaves this one out.
OF_ALLOCATORS = {"later_saves_are_uses"}
RULES = sorted(set(sim.rules()) - OF_ALLOCATORS)
#: Leaving it out orders all accesses as before, and keeps the wrong bytes.
VALUE_RULES = {"failed_drain_keeps_bytes"}


def is_clean(report: object) -> bool:
    names = ("num_races", "num_wrong", "num_leaked", "num_errors", "num_faults")
    return all(getattr(report, name) == 0 for name in names)


def test_3000_random_programs_are_free_of_races_wrong_values_and_leaks() -> None:
    often = ("num_puts", "reloaded_bytes", "num_revived", "num_early_releases", "num_disk_puts", "num_prefetched")
    rarely = ("num_kept_busy", "num_kept_behind", "num_host_waits", "num_failed_writes")
    totals = dict.fromkeys((*often, *rarely, "num_failed_reads"), 0)
    num_failed_gets = 0
    for seed in range(3000):
        report = sim.run_on_mock_cuda(seed)
        assert is_clean(report), (seed, report.races)
        num_failed_gets += report.num_failed_gets
        for name in totals:
            totals[name] += getattr(report.stats, name)
    assert all(totals[name] > 3000 for name in often), totals  # the programs do exercise it
    assert all(totals[name] > 200 for name in rarely), totals
    assert num_failed_gets > 50 and totals["num_failed_reads"] > 50, (num_failed_gets, totals)


def is_caught(report: object, rule: str) -> bool:
    return getattr(report, "num_wrong" if rule in VALUE_RULES else "num_races") > 0


@pytest.mark.parametrize("rule", RULES)
def test_leaving_out_a_rule_is_caught(rule: str) -> None:
    assert any(is_caught(sim.run_on_mock_cuda(seed, rule), rule) for seed in range(4000))


def test_the_rules_of_the_protocol_are_all_there() -> None:
    assert len(set(sim.rules())) == len(sim.rules()) == 20
    with pytest.raises(ValueError, match="no protocol rule is called 'no such rule'"):
        sim.run_on_mock_cuda(0, "no such rule")


def test_wrong_values_are_seen_as_such_and_not_only_as_races() -> None:
    assert any(sim.run_on_mock_cuda(seed, "load_waits_for_allocation").num_wrong for seed in range(50))


@pytest.mark.parametrize("code", [2, 700, 999])
def test_a_device_call_that_fails_anywhere_never_gives_a_wrong_value(code: int) -> None:
    stranded = errors = 0
    for seed, first in itertools.product(range(100), (1, 5, 17, 40, 90, 200)):
        report = sim.run_on_mock_cuda(seed, fail_at=first, code=code)
        assert (report.num_races, report.num_wrong, report.num_faults) == (0, 0, 0), (seed, first)
        stranded += report.stats.stranded_bytes > 0
        errors += report.num_errors > 0
        if report.stats.last_error:
            assert f"({code})" in report.stats.last_error and "cu" in report.stats.last_error
    assert stranded and errors
