// Where offloaded bytes live, as the hooks of offloading use it: stores and their tickets.
//
// A store of C++ (csrc/bind/cpu_store.h) is called directly. Any other Python object is called by the methods of the
// protocol `Store` in actckpt/_offload/stores.py.
// Thread rule: GIL held; calls may release it. They throw Python errors only. Ownership: the end of a ticket gives its
// space back. What a store and its tickets belong to as a Python object must outlive them.
#pragma once

#include <memory>

#include "core/python.h"

namespace actckpt {

// A pending copy: the bytes of one span, from `put` until it ends.
class StoreTicket {
 public:
  StoreTicket() = default;
  StoreTicket(const StoreTicket&) = delete;
  StoreTicket& operator=(const StoreTicket&) = delete;
  virtual ~StoreTicket() = default;

  // Bytes, valid for the stream that is current. Blocks on the CPU, never on a device.
  virtual py::object fetch() = 0;

  // Begins to bring the bytes back. Returns the Bytes that they are read into, or None if there is no need: the source
  // is still held, and stays until `unload`. Never waits.
  virtual py::object prefetch() = 0;

  // Releases what was brought back, and a source that is safe; the bytes stay in the store. Never waits.
  virtual void unload() = 0;

  // The same bytes were saved again, perhaps on another stream, from the storage they were put from.
  virtual void saved_again(PyObject* storage) = 0;
};

// What is to be moved. All references are borrowed.
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

  // Begins to move bytes out; null if they stay. Waits for room only if `must`.
  virtual std::unique_ptr<StoreTicket> put(const Source& source, bool must) = 0;
};

// What calls the Python object `store`.
std::shared_ptr<Store> store_behind(PyObject* store);

void add_store_type(py::module_& module);

}  // namespace actckpt
