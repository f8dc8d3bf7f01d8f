// Stores and tickets, as the offload hooks use them.
//
// A C++ store (csrc/bind/engine_store.h) is called directly. Tests give other Python objects: they have a method
// `put(source, nbytes, *, must)`, which returns None or a ticket, and tickets have the methods below.
// Thread rule: GIL held; calls may release it. They throw Python errors only. Any thread may call them, also while a
// compiled function runs: Python that they run is `torch_private.untraced`.
// Ownership: a store holds a source until its bytes are safe elsewhere; the source must not refer to the ticket. Ending
// a ticket frees its space. That never waits, and may happen in the garbage collector; a running copy keeps its memory
// until it ends. The Python object of a store must outlive its tickets.
#pragma once

#include <memory>

#include "core/python.h"

namespace actckpt {

// A pending copy: the bytes of one span, from `put` until the ticket ends.
class StoreTicket {
 public:
  StoreTicket() = default;
  StoreTicket(const StoreTicket&) = delete;
  StoreTicket& operator=(const StoreTicket&) = delete;
  virtual ~StoreTicket() = default;

  // The bytes, valid for the current stream. Blocks on the CPU, never on a device.
  virtual py::object fetch() = 0;

  // Starts to load the bytes. Returns the destination, or None if there is no need: the source is still held, and stays
  // until `unload`. Never waits.
  virtual py::object prefetch() = 0;

  // Releases loaded bytes, and a source whose bytes are stored; the bytes stay in the store. Never waits.
  virtual void unload() = 0;

  // The same bytes were saved again, perhaps on another stream, from the same storage.
  virtual void saved_again(PyObject* storage) = 0;
};

// What to offload. All references are borrowed.
struct Source {
  PyObject* bytes;  // a Bytes object: keeps them alive
  long long address;
  long long nbytes;
  PyObject* device;
};

class Store {
 public:
  Store() = default;
  Store(const Store&) = delete;
  Store& operator=(const Store&) = delete;
  virtual ~Store() = default;

  // Starts to copy bytes out; null if they stay. Waits for room only if `must`.
  virtual std::unique_ptr<StoreTicket> put(const Source& source, bool must) = 0;
};

// An adapter for the Python object `store`.
std::shared_ptr<Store> store_behind(PyObject* store);

void add_store_type(py::module_& module);

}  // namespace actckpt
