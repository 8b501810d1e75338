// The boxed fallback of PrivateUse1. The meta device gives the geometry of an operator's results, so that the host can
// go on; the stream's thread runs the CPU kernel on aliases of the same memory later.
#include "operators.h"

#include <ATen/EmptyTensor.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/record_function.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include "device_hooks.h"

namespace sim {
namespace {

using at::Tensor;
using c10::DispatchKey;
using c10::DispatchKeySet;
using c10::IValue;
using torch::jit::Stack;

// ---- what the schema of an operator says

struct Schema {
  std::string name;
  int generator = -1;         // which argument
  bool plain = true;          // every result is a Tensor or a list of Tensors
  bool view = false;          // the results alias an argument and write nothing
  bool float_shapes = false;  // a float argument decides on the shape
  std::atomic<bool> has_meta{true};
  std::vector<int> result_is;  // for each result the argument that it is (in-place and out variants), or -1

  explicit Schema(const c10::FunctionSchema& schema) : name(schema.name()) {
    float_shapes = name.find("upsample") != std::string::npos || name.find("range") != std::string::npos;
    const auto& arguments = schema.arguments();
    for (size_t i = 0; i < arguments.size(); i++)
      if (arguments[i].name() == "generator") generator = int(i);
    for (const auto& result : schema.returns()) {
      const auto kind = result.type()->kind();
      const bool list = kind == c10::TypeKind::ListType &&
          result.type()->castRaw<c10::ListType>()->getElementType()->kind() == c10::TypeKind::TensorType;
      if (kind != c10::TypeKind::TensorType && !list) plain = false;
      int same = -1;
      if (const auto* aliased = result.alias_info(); aliased && !aliased->isWrite()) {
        view = true;
      } else if (aliased) {
        for (size_t i = 0; i < arguments.size(); i++)
          if (const auto* of = arguments[i].alias_info(); of && of->beforeSets() == aliased->beforeSets()) same = int(i);
      }
      result_is.push_back(same);
    }
  }
};

Schema& schema_of(const c10::OperatorHandle& op) {
  static auto* const known = new std::unordered_map<const void*, std::unique_ptr<Schema>>;
  static auto* const mutex = new std::mutex;
  const std::lock_guard<std::mutex> hold(*mutex);
  auto& schema = (*known)[&op.schema()];
  if (!schema) schema = std::make_unique<Schema>(op.schema());
  return *schema;
}

// ---- tensors inside of arguments

template <class F>
void for_each_tensor(const IValue& value, F&& visit) {
  if (value.isTensor()) {
    if (value.toTensor().defined()) visit(value.toTensor());
  } else if (value.isList()) {
    for (const IValue& element : value.toListRef()) for_each_tensor(element, visit);
  }
}

template <class F>
IValue with_tensors(const IValue& value, F&& replace) {
  if (value.isTensor()) return value.toTensor().defined() ? IValue(replace(value.toTensor())) : value;
  if (value.isTensorList()) {
    c10::List<Tensor> made;
    for (const Tensor& t : value.toTensorVector()) made.push_back(t.defined() ? replace(t) : t);
    return made;
  }
  if (!value.isList()) return value;
  const auto& elements = value.toListRef();
  if (std::none_of(elements.begin(), elements.end(), [](const IValue& x) { return x.isTensor(); })) return value;
  c10::List<std::optional<Tensor>> made;  // indices
  for (const IValue& element : elements) {
    const bool present = element.isTensor() && element.toTensor().defined();
    made.push_back(present ? std::optional<Tensor>(replace(element.toTensor())) : std::nullopt);
  }
  return made;
}

bool written(const c10::Argument& argument, const IValue& value) {
  return argument.alias_info() && argument.alias_info()->isWrite() && value.isTensor() && on_sim(value.toTensor());
}

// ---- geometry of results

struct Geometry {
  bool defined = false, dense = true;
  std::vector<int64_t> sizes, strides;
  int64_t offset = 0;
  caffe2::TypeMeta dtype;

  explicit Geometry(const Tensor& t) : defined(t.defined()) {
    if (!defined) return;
    dense = t.is_non_overlapping_and_dense();
    sizes = t.sizes().vec();
    strides = t.strides().vec();
    offset = t.storage_offset();
    dtype = t.dtype();
  }
};
struct Result {
  bool list = false;
  std::vector<Geometry> tensors;
};
using Results = std::shared_ptr<const std::vector<Result>>;

template <class F>
IValue make_result(const Result& result, F&& make) {
  if (!result.list) return result.tensors[0].defined ? make(result.tensors[0]) : Tensor();
  c10::List<Tensor> made;
  for (const Geometry& g : result.tensors) made.push_back(g.defined ? make(g) : Tensor());
  return made;
}

Tensor make_empty(const Geometry& g) {
  const DispatchKeySet keys(DispatchKey::PrivateUse1);
  const auto type = g.dtype.toScalarType();
  if (g.dense) return at::detail::empty_strided_generic(g.sizes, g.strides, &device_allocator(), keys, type);
  return at::detail::empty_generic(g.sizes, &device_allocator(), keys, type, std::nullopt);
}

Tensor make_view(const Tensor& base, const Geometry& g) {
  Tensor made = at::detail::make_tensor<c10::TensorImpl>(
      c10::TensorImpl::VIEW, c10::Storage(base.storage()), DispatchKeySet(DispatchKey::PrivateUse1), g.dtype);
  made.unsafeGetTensorImpl()->set_sizes_and_strides(g.sizes, g.strides, g.offset);
  return made;
}

// Most of torch's meta kernels are Python and take 50 to 200 us, so their answers are kept by what they depend on.
class GeometryKey {
 public:
  bool complete = true;  // all that the geometry depends on is in here
  std::string bytes;

  GeometryKey(const Schema& schema, const Stack& arguments, bool with_floats) : with_floats_(with_floats) {
    put('p', &schema);
    for (const auto& argument : arguments) add(argument);
  }

 private:
  template <class T>
  void put(char tag, T value) {
    bytes.push_back(tag);
    bytes.append(reinterpret_cast<const char*>(&value), sizeof value);
  }
  void put(char tag, c10::IntArrayRef values) {
    bytes.push_back(tag);
    bytes.append(reinterpret_cast<const char*>(values.data()), values.size() * sizeof(int64_t));
  }
  void add(const Tensor& t) {
    if (!t.defined()) return bytes.push_back('U');
    const bool wrapped = t.unsafeGetTensorImpl()->is_wrapped_number();
    put('T', int(t.scalar_type()) | (wrapped ? 256 : 0) | (on_sim(t) ? 512 : 0));
    put('d', t.dim());
    put('s', t.sizes());
    put('t', t.strides());
    put('o', t.storage_offset());
    put('b', t.storage().nbytes());
  }
  void add(const IValue& value) {
    if (value.isTensor()) add(value.toTensor());
    else if (value.isNone()) bytes.push_back('N');
    else if (value.isInt()) put('i', value.toInt());
    else if (value.isBool()) put('B', value.toBool());
    else if (value.isDouble()) put('f', with_floats_ ? value.toDouble() : 0.0);
    else if (value.isString()) {
      put('s', value.toStringRef().size());
      bytes += value.toStringRef();
    } else if (value.isDevice() || value.isGenerator()) bytes.push_back('D');
    else if (value.isList()) {
      put('l', value.toListRef().size());
      for (const IValue& element : value.toListRef()) add(element);
    } else complete = false;
  }
  const bool with_floats_;
};

class KnownGeometries {
 public:
  Results find(const GeometryKey& key) {
    if (!key.complete) return nullptr;
    const std::lock_guard<std::mutex> hold(mutex_);
    const auto found = map_.find(key.bytes);
    return found == map_.end() ? nullptr : found->second;
  }
  void keep(const GeometryKey& key, Results results) {
    if (!key.complete) return;
    const std::lock_guard<std::mutex> hold(mutex_);
    if (map_.size() > 20000) map_.clear();
    map_[key.bytes] = std::move(results);
  }

 private:
  std::mutex mutex_;
  std::unordered_map<std::string, Results> map_;
};
KnownGeometries& known_geometries() {
  static KnownGeometries* const k = new KnownGeometries;
  return *k;
}

// Give a tensor that an operator wrote into the geometry that the operator decided on.
bool adopt_geometry(const Tensor& t, const Tensor& from) {
  if (t.sizes() == from.sizes() && t.strides() == from.strides() && t.storage_offset() == from.storage_offset())
    return false;
  size_t needed = 0;
  if (from.numel() > 0) {
    int64_t last = from.storage_offset();
    for (int64_t i = 0; i < from.dim(); i++) last += (from.size(i) - 1) * from.stride(i);
    needed = size_t(last + 1) * from.itemsize();
  }
  if (needed > t.storage().nbytes()) resize_storage(t.storage().unsafeGetStorageImpl(), needed);
  t.unsafeGetTensorImpl()->set_sizes_and_strides(from.sizes(), from.strides(), from.storage_offset());
  return true;
}

// Ask the meta device. Null for operators whose shapes depend on data: those block, as on a GPU.
Results infer(const c10::OperatorHandle& op, Schema& schema, const Stack& arguments, const GeometryKey& key) {
  if (!op.hasComputedKernelForDispatchKey(DispatchKey::Meta)) {
    schema.has_meta = false;
    return nullptr;
  }
  Stack meta;
  for (const auto& argument : arguments) {
    if (argument.isDevice()) meta.emplace_back(c10::Device(c10::kMeta));
    else if (argument.isGenerator()) meta.emplace_back();
    else meta.push_back(with_tensors(argument, [](const Tensor& t) {  // Python meta kernels want numbers on the CPU
      return t.unsafeGetTensorImpl()->is_wrapped_number() ? t : meta_alias(t);
    }));
  }
  auto results = std::make_shared<std::vector<Result>>();
  bool resized = false;
  try {
    Stack stack = meta;
    op.redispatchBoxed(DispatchKeySet(DispatchKey::Meta), &stack);
    for (const auto& value : stack) {
      Result result;
      result.list = !value.isTensor();
      if (value.isTensor()) result.tensors.emplace_back(value.toTensor());
      else for (const Tensor& t : value.toTensorVector()) result.tensors.emplace_back(t);
      results->push_back(std::move(result));
    }
    for (size_t i = 0; i < arguments.size(); i++)
      if (written(op.schema().arguments()[i], arguments[i]))
        resized |= adopt_geometry(arguments[i].toTensor(), meta[i].toTensor());
  } catch (const std::exception& error) {
    if (getenv("SIM_DEBUG")) fprintf(stderr, "sim: no geometry of %s: %s\n", schema.name.c_str(), error.what());
    return nullptr;
  }
  if (!resized) known_geometries().keep(key, results);
  return results;
}

// ---- running

void copy_result(const std::string& name, const Tensor& to, const Tensor& from) {
  if (!from.defined()) return;
  TORCH_CHECK(to.sizes() == from.sizes() && to.scalar_type() == from.scalar_type(), name, ": the meta device gave ",
              to.sizes(), " ", to.scalar_type(), ", the kernel ", from.sizes(), " ", from.scalar_type());
  to.copy_(from);
}

std::shared_ptr<Stack> cpu_arguments(const Stack& arguments, const Schema& schema, c10::DeviceIndex device) {
  auto made = std::make_shared<Stack>();
  for (size_t i = 0; i < arguments.size(); i++) {
    const auto& argument = arguments[i];
    if (int(i) == schema.generator) {
      std::optional<at::Generator> given;
      if (argument.isGenerator()) given = argument.toGenerator();
      made->emplace_back(take_generator(given, device));
    } else if (argument.isDevice()) {
      made->emplace_back(c10::Device(c10::kCPU));
    } else {
      made->push_back(with_tensors(argument, [](const Tensor& t) { return on_sim(t) ? cpu_alias(t) : host_copy(t); }));
    }
  }
  return made;
}

Stack enqueue(const c10::OperatorHandle& op, const Schema& schema, const Stack& arguments, const Results& results,
              std::shared_ptr<Stack> cpu, Queue& queue) {
  Stack returned(results->size());
  auto destinations = std::make_shared<std::vector<std::vector<Tensor>>>(results->size());
  for (size_t r = 0; r < results->size(); r++) {
    if (schema.result_is[r] >= 0) {
      returned[r] = arguments[size_t(schema.result_is[r])];
      continue;
    }
    returned[r] = make_result((*results)[r], [&](const Geometry& g) {
      Tensor made = make_empty(g);
      (*destinations)[r].push_back(cpu_alias(made));
      return made;
    });
  }
  launch(queue, schema.name, [op, cpu, destinations, name = schema.name] {
    op.redispatchBoxed(DispatchKeySet(DispatchKey::CPU), cpu.get());
    for (size_t r = 0; r < destinations->size(); r++) {
      const auto& to = (*destinations)[r];
      if (to.empty()) continue;
      size_t next = 0;
      for_each_tensor((*cpu)[r], [&](const Tensor& from) { copy_result(name, to.at(next++), from); });
    }
  });
  return returned;
}

Stack run_and_wait(const c10::OperatorHandle& op, const Schema& schema, const Stack& arguments,
                   std::shared_ptr<Stack> cpu, Queue& queue) {
  counters().blocking++;
  {
    const std::lock_guard<std::mutex> hold(counters().mutex);
    counters().blocking_operators[schema.name]++;
  }
  const Stack inputs = *cpu;
  auto error = std::make_shared<std::exception_ptr>();
  launch(queue, schema.name, [op, cpu, error] {
    try {
      op.redispatchBoxed(DispatchKeySet(DispatchKey::CPU), cpu.get());
    } catch (...) {
      *error = std::current_exception();
    }
  });
  simStreamSynchronize(&queue);
  if (*error) std::rethrow_exception(*error);
  for (size_t i = 0; i < arguments.size(); i++) {
    if (!written(op.schema().arguments()[i], arguments[i])) continue;
    const Tensor &t = arguments[i].toTensor(), &from = inputs[i].toTensor();
    if (t.sizes() == from.sizes()) continue;
    adopt_geometry(t, from);
    simStreamSynchronize(&queue);
    cpu_alias(t).copy_(from);
  }
  Stack returned;
  for (size_t r = 0; r < cpu->size(); r++) {
    if (schema.result_is[r] >= 0) {
      returned.push_back(arguments[size_t(schema.result_is[r])]);
      continue;
    }
    returned.push_back(with_tensors((*cpu)[r], [](const Tensor& from) {
      Tensor made = make_empty(Geometry(from));
      cpu_alias(made).copy_(from);
      return made;
    }));
  }
  return returned;
}

// The first tensor on the device: it says where an operator runs, and is what a view is a view of.
Tensor first_on_sim(const Stack& arguments) {
  Tensor first;
  for (const auto& argument : arguments)
    for_each_tensor(argument, [&](const Tensor& t) {
      if (!first.defined() && on_sim(t)) first = t;
    });
  return first;
}

c10::DeviceIndex device_of(const Tensor& first, const Stack& arguments) {
  if (first.defined()) return first.device().index();
  for (const auto& argument : arguments)
    if (argument.isDevice() && argument.toDevice().type() == kSim && argument.toDevice().has_index())
      return argument.toDevice().index();
  return current_device();
}

}  // namespace

void launch(Queue& queue, const std::string& name, std::function<void()> body) {
  counters().enqueued++;
  queue.push([name, cost = settings().kernel_cost(name), body = std::move(body)](Queue& queue) {
    const ns start = queue.clock;
    queue.clock = start + cost;
    body();
    if (settings().real_clock != 0) queue.clock = std::max<ns>(queue.clock, now());
    trace({name, queue.id, -1, queue.task_enqueued(), start, start, queue.clock});
  });
}

void run_operator(const c10::OperatorHandle& op, Stack* stack) {
  Schema& schema = schema_of(op);
  const size_t num_arguments = op.schema().arguments().size();
  const Stack arguments(stack->end() - int64_t(num_arguments), stack->end());
  const Tensor first = first_on_sim(arguments);
  const auto device = device_of(first, arguments);

  const c10::DeviceGuard on_device(c10::Device(kSim, device));
  const at::DisableRecordFunctionGuard no_profiling;  // a host profile shows the operator once
  const at::AutoDispatchBelowADInplaceOrView no_autograd;
  const c10::impl::ExcludeDispatchKeyGuard no_modes(
      DispatchKeySet(DispatchKey::Python) | DispatchKeySet(DispatchKey::PythonTLSSnapshot));

  Results results;
  if (schema.plain && schema.has_meta) {
    const GeometryKey key(schema, arguments, !first.defined() || schema.float_shapes);
    results = known_geometries().find(key);
    if (!results) results = infer(op, schema, arguments, key);
  }
  Stack returned;
  if (results && schema.view) {
    for (const auto& result : *results)
      returned.push_back(make_result(result, [&](const Geometry& g) { return make_view(first, g); }));
  } else {
    auto cpu = cpu_arguments(arguments, schema, device);
    Queue& queue = current_queue(device);
    returned = results ? enqueue(op, schema, arguments, results, std::move(cpu), queue)
                       : run_and_wait(op, schema, arguments, std::move(cpu), queue);
  }
  torch::jit::drop(*stack, num_arguments);
  for (auto& value : returned) stack->push_back(std::move(value));
}

namespace {
void fallback(const c10::OperatorHandle& op, Stack* stack) { run_operator(op, stack); }
TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }
}  // namespace

}  // namespace sim
