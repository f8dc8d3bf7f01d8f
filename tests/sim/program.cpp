#include "sim/program.h"

#include <algorithm>
#include <utility>

#include "engine/errors.h"

namespace actckpt::sim {
namespace {

KeepAlive to_keep(const TensorPtr& tensor) { return new TensorPtr(tensor); }

const TensorPtr& from_keep(KeepAlive keep) { return *static_cast<TensorPtr*>(keep); }

}  // namespace

Machine Machine::make(World* world) {
  Machine machine{world, {}, {}};
  const std::uint64_t num_devices = 1 + world->below(2);
  for (std::uint64_t device = 0; device < num_devices; ++device) {
    std::vector<int> queues;
    for (std::uint64_t n = 1 + world->below(3); n > 0; --n) {
      queues.push_back(world->add_queue(static_cast<int>(device)));
    }
    machine.default_queues.push_back(queues.front());
    machine.user_queues.push_back(std::move(queues));
  }
  return machine;
}

Stream Machine::stream_of(int queue) const {
  const int device = world->device_of(queue);
  const bool is_default = default_queues[static_cast<std::size_t>(device)] == queue;
  return {device, is_default ? 0 : static_cast<std::uintptr_t>(queue) + 1};
}

int Machine::queue_of(Stream stream) const {
  return stream.handle == 0 ? default_queues[static_cast<std::size_t>(stream.device)]
                            : static_cast<int>(stream.handle) - 1;
}

// What autograd holds for one saved tensor; its end is the drop.
struct Program::Saved {
  Program* const program;
  const DeviceTicketPtr ticket;  // null: the tensor itself is kept
  const TensorPtr kept;
  const Values values;

  Saved(Program* p, DeviceTicketPtr t, const TensorPtr& tensor)
      : program(p), ticket(std::move(t)), kept(ticket == nullptr ? tensor : nullptr), values(tensor->values) {}
  Saved(const Saved&) = delete;
  Saved& operator=(const Saved&) = delete;
  ~Saved() {
    if (ticket != nullptr) {
      Releases releases;
      program->engine_->drop(ticket, &releases);
      program->finish(&releases);
    }
  }
};

Program::Program(Machine machine, std::shared_ptr<DeviceEngine> engine)
    : machine_(std::move(machine)), world_(machine_.world), allocator_(world_), engine_(std::move(engine)) {}

int Program::pick_queue(int device) {
  const auto& queues = machine_.user_queues[static_cast<std::size_t>(device)];
  return world_->chance(0.5) ? queues.front() : queues[world_->below(queues.size())];
}

// The framework's part: record_stream, then drop.
void Program::finish(Releases* releases) {
  for (const Release& release : *releases) {
    for (const Stream use : release.uses) {
      from_keep(release.keep)->record_stream(machine_.queue_of(use));
    }
    delete static_cast<TensorPtr*>(release.keep);
  }
  releases->clear();
}

// What a right program does before it uses a tensor of another stream.
void Program::order(int queue, const TensorPtr& tensor) {
  if (tensor->writer != queue) {
    world_->wait(queue, world_->record(tensor->writer));
  }
  tensor->record_stream(queue);
}

TensorPtr Program::launch(int queue, const std::vector<TensorPtr>& inputs) {
  TensorPtr output = allocator_.allocate(queue, 1 + world_->below(3));
  std::vector<World::Input> reads;
  std::uint64_t mixed = next_value_++;
  for (const TensorPtr& input : inputs) {
    reads.push_back({input->span, &input->values});
    mixed = mixed * 0x9E3779B97F4A7C15 + input->values.front();
  }
  for (std::uint64_t& value : output->values) {
    value = mixed++;
  }
  world_->kernel(queue, reads, output->span, output->values);
  return output;
}

Program::SavedPtr Program::save(const TensorPtr& tensor, int queue) {
  const Stream stream = machine_.stream_of(queue);
  for (const auto& [known, weak] : known_) {
    const SavedPtr saved = weak.lock();
    if (saved != nullptr && known.lock() == tensor) {  // line 2
      if (saved->ticket != nullptr) {
        engine_->use(saved->ticket, stream);
      }
      return saved;
    }
  }
  Releases releases;
  const KeepAlive keep = to_keep(tensor);
  const Put put = engine_->put(tensor->span.address, tensor->span.num_cells * kCellBytes, stream, keep,
                               world_->chance(0.5), &releases);
  finish(&releases);
  if (!put.holds_keep) {
    delete static_cast<TensorPtr*>(keep);
  }
  auto saved = std::make_shared<Saved>(this, put.ticket, tensor);
  known_.erase(std::remove_if(known_.begin(), known_.end(), [](const auto& pair) { return pair.second.expired(); }),
               known_.end());
  known_.emplace_back(tensor, saved);
  return saved;
}

void Program::forward(Graph* graph) {
  const int queue = pick_queue(graph->device);
  std::vector<TensorPtr> inputs;
  if (graph->output != nullptr) {
    inputs.push_back(graph->output);
  }
  if (!alive_.empty() && world_->chance(0.5)) {
    const TensorPtr& other = alive_[world_->below(alive_.size())];
    if (world_->device_of(other->queue) == graph->device) {
      inputs.push_back(other);
    }
  }
  Node node{queue, {}};
  for (const TensorPtr& input : inputs) {
    order(queue, input);
    if (world_->chance(0.6)) {
      node.saves.push_back(save(input, queue));  // before the kernel is launched
    }
  }
  graph->output = launch(queue, inputs);
  if (world_->chance(0.6)) {
    node.saves.push_back(save(graph->output, queue));
  }
  if (world_->chance(0.3)) {
    alive_.push_back(graph->output);
  }
  if (!alive_.empty() && world_->chance(0.3)) {
    alive_.erase(alive_.begin() + static_cast<std::ptrdiff_t>(world_->below(alive_.size())));
  }
  graph->nodes.push_back(std::move(node));
}

TensorPtr Program::unpack(Saved* saved, int queue) {
  if (saved->ticket == nullptr) {
    return saved->kept;
  }
  const Stream stream = machine_.stream_of(queue);
  for (;;) {
    Releases releases;
    Got got{GotKind::kNeedsLoad, nullptr, false};
    try {
      got = engine_->get(saved->ticket, stream, &releases);
    } catch (const OffloadReadError&) {
      finish(&releases);
      ++num_failed_gets_;
      continue;
    } catch (...) {
      finish(&releases);
      throw;
    }
    TensorPtr tensor = got.keep == nullptr ? nullptr : from_keep(got.keep);
    finish(&releases);
    if (tensor != nullptr) {
      if (got.record_stream) {
        tensor->record_stream(queue);
      }
      return tensor;
    }
    if (got.kind == GotKind::kBusy) {
      engine_->wait(saved->ticket);
    } else {
      reload(saved, stream, Side::kUrgent);
    }
  }
}

// Allocates a destination on `stream` and begins to load it.
void Program::reload(Saved* saved, Stream stream, Side side) {
  const TensorPtr dst = allocator_.allocate(machine_.queue_of(stream), saved->values.size());
  dst->values = saved->values;
  const KeepAlive keep = to_keep(dst);
  Releases releases;
  bool taken = false;
  try {
    taken = engine_->load(saved->ticket, stream, dst->span.address, keep, side, &releases);
  } catch (...) {
    delete static_cast<TensorPtr*>(keep);
    finish(&releases);
    throw;
  }
  if (!taken) {
    delete static_cast<TensorPtr*>(keep);
  }
  finish(&releases);
}

void Program::prefetch_some(const Graph& graph) {
  for (std::uint64_t n = world_->below(4); n > 0; --n) {
    const Node& node = graph.nodes[world_->below(graph.nodes.size())];
    if (node.saves.empty()) {
      continue;
    }
    const SavedPtr& saved = node.saves[world_->below(node.saves.size())];
    if (saved->ticket == nullptr) {
      continue;
    }
    reload(saved.get(), saved->ticket->put_stream, Side::kIn);
  }
}

// User code in a backward that reads its saved tensor on a stream of its own, and joins it.
void Program::consume_elsewhere(Saved* saved, int queue) {
  const int other = pick_queue(world_->device_of(queue));
  world_->wait(other, world_->record(queue));
  const TensorPtr tensor = unpack(saved, other);
  launch(other, {tensor});
  if (world_->chance(0.5)) {
    launch(queue, {unpack(saved, queue)});  // a second consumer, before the streams join
  }
  world_->wait(queue, world_->record(other));
}

void Program::backward_node(Graph* graph, Node* node) {
  std::shuffle(node->saves.begin(), node->saves.end(), world_->rng());
  std::vector<TensorPtr> inputs;
  if (graph->grad != nullptr) {
    order(node->queue, graph->grad);
    inputs.push_back(graph->grad);
  }
  for (const SavedPtr& saved : node->saves) {
    if (world_->chance(0.15)) {
      continue;  // a branch that nobody reads
    }
    if (world_->chance(0.15)) {
      consume_elsewhere(saved.get(), node->queue);
    }
    inputs.push_back(unpack(saved.get(), node->queue));
    if (world_->chance(0.5)) {
      prefetch_some(*graph);
    }
  }
  graph->grad = launch(node->queue, inputs);
}

// False when the graph is finished.
bool Program::backward(Graph* graph) {
  if (graph->num_passes == 0) {
    graph->num_passes = world_->chance(0.3) ? 2 : 1;
    graph->left = graph->nodes.size();
    graph->output = nullptr;
  }
  Node* const node = &graph->nodes[--graph->left];
  backward_node(graph, node);
  if (graph->num_passes == 1) {
    node->saves.clear();
  } else if (world_->chance(0.5)) {
    for (const SavedPtr& saved : node->saves) {
      Releases releases;
      if (saved->ticket != nullptr) {
        engine_->unload(saved->ticket, &releases);
      }
      finish(&releases);
    }
  }
  if (graph->left > 0) {
    return true;
  }
  graph->grad = nullptr;
  graph->left = graph->nodes.size();
  return --graph->num_passes > 0;
}

Report Program::run(const Pool& pool, const SimTier& tier) {
  for (std::uint64_t steps = 20 + world_->below(60); steps > 0; --steps) {
    if (graphs_.empty() || world_->chance(0.08)) {
      graphs_.push_back(Graph());
      graphs_.back().device = static_cast<int>(world_->below(machine_.user_queues.size()));
    }
    auto graph = std::next(graphs_.begin(), static_cast<std::ptrdiff_t>(world_->below(graphs_.size())));
    try {
      if (graph->nodes.empty() || (graph->num_passes == 0 && world_->chance(0.7))) {
        forward(&*graph);
      } else if (world_->chance(0.04) || !backward(&*graph)) {
        graphs_.erase(graph);  // done, or an exception
      }
    } catch (const DeviceError&) {
      ++num_errors_;
      graphs_.erase(graph);
    }
  }
  graphs_.clear();
  alive_.clear();
  Releases releases;
  for (int i = 0; i < 5; ++i) {
    world_->drain();
    engine_->poll(&releases);
    finish(&releases);
  }
  world_->drain();
  Report report;
  report.num_errors = num_errors_;
  report.stats = engine_->stats();
  report.num_races = world_->checker().num_races();
  report.races = world_->checker().descriptions();
  report.num_wrong = world_->num_wrong();
  report.num_failed_gets = num_failed_gets_;
  report.num_leaked = allocator_.num_live() + report.stats.num_live + pool.stats().num_blocks +
                      report.stats.spill.stuck_bytes + tier.num_live();
  return report;
}

}  // namespace actckpt::sim
