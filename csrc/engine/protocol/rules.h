// The rules of the event protocol by name, so that a test can leave one out and watch it fail.
//
// Contract: all on, always, but in the mutation test. Thread rule, ownership: a value.

#pragma once

namespace actckpt {

struct ProtocolRules {
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
};

struct NamedRule {
  const char* name;
  bool ProtocolRules::*member;
};

inline constexpr NamedRule kNamedRules[] = {
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
};

}  // namespace actckpt
