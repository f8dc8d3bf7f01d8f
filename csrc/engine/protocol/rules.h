// The rules of the event protocol by name, so that a test can disable one and watch the protocol fail.
//
// Contract: all are on, except in the mutation test. Thread rule, ownership: a value.

#pragma once

namespace actckpt {

struct ProtocolRules {
  bool later_saves_are_uses = true;               // line 2
  bool write_out_waits_for_stream = true;         // line 4: D waits for record(S)
  bool slot_owner_waits = true;                   // lines 4, 12: D waits for the slot's last events
  bool reused_slots_keep_fences = true;           // NOTE [Unpassed fences]
  bool stream_waits_before_early_release = true;  // line 6
  bool record_stream_on_sources = true;           // line r
  bool every_consumer_waits = true;               // line 9
  bool record_stream_on_destinations = true;      // line 10
  bool load_waits_for_allocation = true;          // line 11: H waits for record(A)
  bool reload_waits_for_write_out = true;         // line 11: H waits for d2h
  bool source_outlives_dropped_ticket = true;     // line 13
  bool unread_prefetch_outlives_copy = true;      // line 13
  bool home_waits_for_early_grave = true;         // line 13
  // Lines 16-19: copies through bounce buffers.
  bool bounce_owner_waits = true;           // 16: D waits for the buffer's last events
  bool drain_waits_for_write_out = true;    // 17: a worker reads only what D has written
  bool bounce_waits_for_drain = true;       // 17: the buffer is kept until the tier has the bytes
  bool failed_drain_keeps_bytes = true;     // 17: after a failed write, the buffer has them
  bool fill_waits_for_bounce = true;        // 18: a worker writes only what H has read
  bool reload_waits_for_fill = true;        // 18: H copies only what a worker has filled
  bool place_outlives_dropped_haul = true;  // 19: a tier's space is kept while a worker is in it
};

struct NamedRule {
  const char* name;
  bool ProtocolRules::* member;
};

inline constexpr NamedRule kNamedRules[] = {
    {"later_saves_are_uses", &ProtocolRules::later_saves_are_uses},
    {"write_out_waits_for_stream", &ProtocolRules::write_out_waits_for_stream},
    {"slot_owner_waits", &ProtocolRules::slot_owner_waits},
    {"reused_slots_keep_fences", &ProtocolRules::reused_slots_keep_fences},
    {"stream_waits_before_early_release", &ProtocolRules::stream_waits_before_early_release},
    {"record_stream_on_sources", &ProtocolRules::record_stream_on_sources},
    {"every_consumer_waits", &ProtocolRules::every_consumer_waits},
    {"record_stream_on_destinations", &ProtocolRules::record_stream_on_destinations},
    {"load_waits_for_allocation", &ProtocolRules::load_waits_for_allocation},
    {"reload_waits_for_write_out", &ProtocolRules::reload_waits_for_write_out},
    {"source_outlives_dropped_ticket", &ProtocolRules::source_outlives_dropped_ticket},
    {"unread_prefetch_outlives_copy", &ProtocolRules::unread_prefetch_outlives_copy},
    {"home_waits_for_early_grave", &ProtocolRules::home_waits_for_early_grave},
    {"bounce_owner_waits", &ProtocolRules::bounce_owner_waits},
    {"drain_waits_for_write_out", &ProtocolRules::drain_waits_for_write_out},
    {"bounce_waits_for_drain", &ProtocolRules::bounce_waits_for_drain},
    {"failed_drain_keeps_bytes", &ProtocolRules::failed_drain_keeps_bytes},
    {"fill_waits_for_bounce", &ProtocolRules::fill_waits_for_bounce},
    {"reload_waits_for_fill", &ProtocolRules::reload_waits_for_fill},
    {"place_outlives_dropped_haul", &ProtocolRules::place_outlives_dropped_haul},
};

}  // namespace actckpt
