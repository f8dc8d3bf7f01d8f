// Binds the engine's memory and disk storage: pool and spill file. Each function documents whether it releases the GIL.

#include <pybind11/stl.h>

#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "bind/engine.h"
#include "bind/given.h"
#include "engine/disk/spill_file.h"
#include "engine/errors.h"
#include "engine/memory/pool.h"

namespace actckpt::python {
namespace {

using NoGil = py::call_guard<py::gil_scoped_release>;

// A block and the pool it must not outlive.
struct PoolBlock {
  std::shared_ptr<Pool> pool;
  Block block;
};

struct DiskBlock {
  std::shared_ptr<SpillFile> file;
  SpillBlock block;
};

// The memory that a file reads or writes: the caller's where it is aligned and has room, else a copy.
class AlignedBuffer {
 public:
  AlignedBuffer(std::uintptr_t address, std::size_t bytes) : data_(to_pointer(address)) {
    if (bytes > 0 && (address % kGranule != 0 || bytes % kGranule != 0)) {
      slab_.emplace(round_up(bytes, kGranule), nullptr);
      data_ = slab_->data();
    }
  }
  std::byte* data() const { return data_; }
  bool is_copy() const { return slab_.has_value(); }

 private:
  std::byte* data_;
  std::optional<Slab> slab_;
};

DiskBlock write(const std::shared_ptr<SpillFile>& file, std::uintptr_t ptr, std::size_t nbytes) {
  std::optional<SpillBlock> block = file->try_reserve(nbytes);
  if (!block.has_value()) {
    const SpillStats stats = file->stats();
    throw OffloadFullError("cannot spill " + format_bytes(nbytes) + " to '" + file->folder() + "': limit " +
                           format_bytes(stats.limit_bytes) + ", in use " + format_bytes(stats.disk_bytes) +
                           ". Raise disk_limit, or offload less.");
  }
  const AlignedBuffer buffer(ptr, nbytes);
  if (buffer.is_copy()) {
    std::memcpy(buffer.data(), to_pointer(ptr), nbytes);
  }
  file->write(&*block, buffer.data());
  return {file, std::move(*block)};
}

void read(SpillFile& file, const DiskBlock& block, std::uintptr_t ptr) {
  if (block.file.get() != &file) {
    throw OffloadError("read: this block belongs to another spill file.");
  }
  const AlignedBuffer buffer(ptr, block.block.bytes());
  file.read(block.block, buffer.data());
  if (buffer.is_copy()) {
    std::memcpy(to_pointer(ptr), buffer.data(), block.block.bytes());
  }
}

void bind_pool(py::module_& module) {
  py::class_<PoolStats>(module, "PoolStats")
      .def_readonly("limit_bytes", &PoolStats::limit_bytes)
      .def_readonly("pool_bytes", &PoolStats::pool_bytes)
      .def_readonly("peak_pool_bytes", &PoolStats::peak_pool_bytes)
      .def_readonly("stored_bytes", &PoolStats::stored_bytes)
      .def_readonly("peak_stored_bytes", &PoolStats::peak_stored_bytes)
      .def_readonly("free_bytes", &PoolStats::free_bytes)
      .def_readonly("largest_free_bytes", &PoolStats::largest_free_bytes)
      .def_readonly("num_slabs", &PoolStats::num_slabs)
      .def_readonly("num_blocks", &PoolStats::num_blocks)
      .def_readonly("num_refused_pins", &PoolStats::num_refused_pins);

  py::class_<PoolBlock>(module, "PoolBlock")
      .def_property_readonly("nbytes", [](const PoolBlock& self) { return self.block.bytes(); })
      .def_property_readonly("segments",
                             [](const PoolBlock& self) {
                               std::vector<std::pair<std::uintptr_t, std::size_t>> segments;
                               for (const Segment& segment : self.block.segments()) {
                                 segments.emplace_back(reinterpret_cast<std::uintptr_t>(segment.ptr), segment.bytes);
                               }
                               return segments;
                             })
      // Keeps the GIL: a leaf lock, no system call.
      .def("free", [](PoolBlock& self) { self.block = Block(); });

  py::class_<Pool, std::shared_ptr<Pool>>(module, "Pool")
      .def(py::init([](std::uint64_t limit, std::uint64_t slab, std::uint64_t growth) {
             return std::make_shared<Pool>(PoolConfig{limit, slab, growth});
           }),
           py::kw_only(), py::arg("limit_bytes") = UINT64_MAX, py::arg("slab_bytes") = PoolConfig().slab_bytes,
           py::arg("growth_percent") = PoolConfig().growth_percent)
      // Release the GIL: may map memory.
      .def(
          "allocate",
          [](const std::shared_ptr<Pool>& self, std::size_t nbytes) { return PoolBlock{self, self->allocate(nbytes)}; },
          py::arg("nbytes"), NoGil())
      .def("trim", &Pool::trim, NoGil())
      .def("stats", &Pool::stats, NoGil());
}

void bind_spill_stats(py::module_& module) {
  py::class_<SpillStats>(module, "SpillStats")
      .def_readonly("limit_bytes", &SpillStats::limit_bytes)
      .def_readonly("disk_bytes", &SpillStats::disk_bytes)
      .def_readonly("peak_disk_bytes", &SpillStats::peak_disk_bytes)
      .def_readonly("file_bytes", &SpillStats::file_bytes)
      .def_readonly("written_bytes", &SpillStats::written_bytes)
      .def_readonly("read_bytes", &SpillStats::read_bytes)
      .def_readonly("num_blocks", &SpillStats::num_blocks)
      .def_readonly("num_failed_writes", &SpillStats::num_failed_writes)
      .def_readonly("num_failed_reads", &SpillStats::num_failed_reads);
}

void bind_spill(py::module_& module) {
  bind_spill_stats(module);
  py::class_<DiskBlock>(module, "SpillBlock")
      .def_property_readonly("nbytes", [](const DiskBlock& self) { return self.block.bytes(); })
      .def_property_readonly("checksum", [](const DiskBlock& self) { return self.block.checksum(); })
      // Keeps the GIL: a leaf lock, no system call.
      .def("free", [](DiskBlock& self) { self.block = SpillBlock(); });

  py::class_<SpillFile, std::shared_ptr<SpillFile>>(module, "SpillFile")
      .def(py::init([](const std::string& folder, std::uint64_t limit, bool direct, const py::object& io) {
             SpillConfig config;
             config.folder = folder;
             config.limit_bytes = limit;
             config.direct = direct;
             return std::make_shared<SpillFile>(config,
                                                io.is_none() ? nullptr : given<GivenFileIo>(io, kFileIoCapsule));
           }),
           py::arg("folder"), py::kw_only(), py::arg("limit_bytes") = UINT64_MAX, py::arg("direct") = true,
           py::arg("io") = py::none())
      // Release the GIL: block on the disk.
      .def("write", &write, py::arg("ptr"), py::arg("nbytes"), NoGil())
      .def("read", &read, py::arg("block"), py::arg("ptr"), NoGil())
      .def("stats", &SpillFile::stats, NoGil())
      .def_property_readonly("direct", &SpillFile::direct)
      .def_property_readonly("folder", &SpillFile::folder);

  module.def("is_memory_folder", &is_memory_folder, py::arg("folder"), NoGil());
}

}  // namespace

void bind_memory(py::module_& module) {
  bind_pool(module);
  bind_spill(module);
}

}  // namespace actckpt::python
