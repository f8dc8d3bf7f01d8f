// Stores and tickets, as the offload hooks use them.
//
// A C++ store (csrc/bind/cpu_store.h) is called directly; any other Python object by the methods of the protocol
// `Store` in actckpt/_offload/stores.py.
// Thread rule: GIL held; calls may release it. They throw Python errors only. Ownership: ending a ticket frees its
// space. The Python objects that own a store and its tickets must outlive them.
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
