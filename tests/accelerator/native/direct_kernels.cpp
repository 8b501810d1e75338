// Operators that cannot go through the fallback: memory, views, copies between host and device, and those that torch
// defines for each back end.
#include <ATen/EmptyTensor.h>
#include <ATen/ExpandUtils.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/bernoulli.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/view_native.h>
#include <ATen/record_function.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include "device_hooks.h"
#include "operators.h"

namespace sim {
namespace {

using at::Tensor;
using c10::DispatchKey;
using c10::DispatchKeySet;
using torch::jit::Stack;

// ---- memory and views

Tensor empty_memory_format(c10::IntArrayRef sizes, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                           std::optional<at::Device> device, std::optional<bool>,
                           std::optional<at::MemoryFormat> format) {
  const c10::OptionalDeviceGuard on_device(device);
  return at::detail::empty_generic(sizes, &device_allocator(), DispatchKeySet(DispatchKey::PrivateUse1),
                                   c10::dtype_or_default(dtype), format);
}

Tensor empty_strided(c10::IntArrayRef sizes, c10::IntArrayRef strides, std::optional<at::ScalarType> dtype,
                     std::optional<at::Layout>, std::optional<at::Device> device, std::optional<bool>) {
  const c10::OptionalDeviceGuard on_device(device);
  return at::detail::empty_strided_generic(sizes, strides, &device_allocator(),
                                           DispatchKeySet(DispatchKey::PrivateUse1), c10::dtype_or_default(dtype));
}

const Tensor& resize_(const Tensor& self, c10::IntArrayRef sizes, std::optional<at::MemoryFormat> format) {
  if (self.sizes() == sizes && !format) return self;
  const size_t needed = size_t(self.storage_offset() + c10::multiply_integers(sizes)) * self.itemsize();
  if (needed > self.storage().nbytes()) resize_storage(self.storage().unsafeGetStorageImpl(), needed);
  self.unsafeGetTensorImpl()->set_sizes_contiguous(sizes);
  if (format && *format != at::MemoryFormat::Preserve) self.unsafeGetTensorImpl()->empty_tensor_restride(*format);
  return self;
}

Tensor& set_storage_offset(Tensor& self, at::Storage storage, int64_t offset, c10::IntArrayRef sizes,
                           c10::IntArrayRef strides) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(storage));
  if (strides.data() == nullptr || (strides.empty() && !sizes.empty())) {
    impl->set_sizes_contiguous(sizes);
    impl->set_storage_offset(offset);
  } else {
    impl->set_sizes_and_strides(sizes, strides, offset);
  }
  return self;
}
Tensor& set_storage(Tensor& self, at::Storage storage) {
  const auto elements = int64_t(storage.nbytes() / self.itemsize());
  return set_storage_offset(self, std::move(storage), 0, {elements}, {1});
}
Tensor& set_tensor(Tensor& self, const Tensor& from) {
  return set_storage_offset(self, from.storage(), from.storage_offset(), from.sizes(), from.strides());
}
Tensor& set_none(Tensor& self) {
  c10::Storage nothing(c10::Storage::use_byte_size_t(), 0, allocate(0, self.device().index()), &device_allocator(),
                       true);
  return set_storage_offset(self, std::move(nothing), 0, {0}, {1});
}
void record_stream(Tensor&, c10::Stream) {}  // queued tasks hold the blocks that they use

// ---- copies

void enqueue_copy(const Tensor& to, const Tensor& from, bool non_blocking) {
  TORCH_CHECK(at::is_expandable_to(from.sizes(), to.sizes()), "copy_: cannot broadcast ", from.sizes(), " to ",
              to.sizes());
  if (to.numel() == 0) return;
  const at::DisableRecordFunctionGuard no_profiling;
  const at::AutoDispatchBelowADInplaceOrView no_autograd;
  const bool reads_device = on_sim(from), writes_device = on_sim(to);
  Queue& queue = current_queue((reads_device ? from : to).device().index());
  // A driver stages pageable memory before it returns; only pinned memory is read later.
  const bool staged = !reads_device && non_blocking && !is_pinned(from.storage().data());
  const Tensor source = reads_device ? cpu_alias(from) : staged ? host_copy(from) : from.alias();
  const Tensor target = writes_device ? cpu_alias(to) : to.alias();
  const bool within = reads_device && writes_device;
  const std::string name = within ? "aten::copy_" : writes_device ? "sim::h2d" : "sim::d2h";
  const ns cost = within ? settings().kernel_cost(name) : settings().copy_cost(name, int64_t(from.nbytes()));
  const bool across = within && from.device() != to.device();
  if (across) simStreamSynchronize(&current_queue(to.device().index()));
  counters().enqueued++;
  queue.push([source, target, cost, name](Queue& queue) {
    const ns start = queue.clock;
    queue.clock = start + cost;
    trace({name, queue.id, -1, queue.task_enqueued(), start, start, start + cost});
    target.copy_(source);
  });
  if (across) current_queue(to.device().index()).wait_for(queue.mark());
  if (!within && !non_blocking) simStreamSynchronize(&queue);
}

Tensor& copy_(Tensor& self, const Tensor& from, bool non_blocking) {
  if (!self.is_same(from)) enqueue_copy(self, from, non_blocking);
  return self;
}
Tensor copy_from(const Tensor& self, const Tensor& to, bool non_blocking) {
  enqueue_copy(to, self, non_blocking);
  return to;
}
Tensor copy_from_and_resize(const Tensor& self, const Tensor& to) {
  if (to.sizes() != self.sizes()) const_cast<Tensor&>(to).resize_(self.sizes());
  enqueue_copy(to, self, false);
  return to;
}

at::Scalar local_scalar_dense(const Tensor& self) {  // .item()
  simStreamSynchronize(&current_queue(self.device().index()));
  const at::AutoDispatchBelowADInplaceOrView no_autograd;
  const at::DisableRecordFunctionGuard no_profiling;
  return cpu_alias(self).item();
}

// ---- operators of each back end

std::tuple<Tensor, Tensor> native_dropout(const Tensor& x, double p, std::optional<bool> train) {
  const c10::DeviceGuard on_device(x.device());
  Tensor y = at::empty_like(x), mask = at::empty_like(x, x.options().dtype(at::kBool));
  auto generator = take_generator(std::nullopt, x.device().index());
  const at::DisableRecordFunctionGuard no_profiling;
  const at::AutoDispatchBelowADInplaceOrView no_autograd;
  const bool drops = train.value_or(true) && p != 0;
  const Tensor from = cpu_alias(x), to = cpu_alias(y), kept = cpu_alias(mask);
  launch(current_queue(x.device().index()), "aten::native_dropout", [=] {
    if (!drops) {
      kept.fill_(true);
      to.copy_(from);
      return;
    }
    kept.copy_(at::empty(from.sizes(), at::kFloat).bernoulli_(1 - p, generator));
    to.copy_(from * kept / (1 - p));
  });
  return {y, mask};
}

void run_named(const char* name, Stack& stack) {
  run_operator(c10::Dispatcher::singleton().findSchemaOrThrow(name, ""), &stack);
}

Tensor convolution(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias, at::IntArrayRef stride,
                   at::IntArrayRef padding, at::IntArrayRef dilation, bool transposed, at::IntArrayRef output_padding,
                   int64_t groups) {
  Stack stack{x, weight, bias.has_value() && bias->defined() ? c10::IValue(*bias) : c10::IValue(), stride.vec(),
              padding.vec(), dilation.vec(), transposed, output_padding.vec(), groups};
  run_named("aten::convolution", stack);
  return stack[0].toTensor();
}

std::tuple<Tensor, Tensor, Tensor> convolution_backward(const Tensor& grad, const Tensor& x, const Tensor& weight,
                                                        at::IntArrayRef stride, at::IntArrayRef padding,
                                                        at::IntArrayRef dilation, bool transposed,
                                                        at::IntArrayRef output_padding, int64_t groups,
                                                        std::array<bool, 3> mask) {
  const std::vector<int64_t> bias{transposed ? weight.size(1) * groups : weight.size(0)};
  Stack stack{grad, x, weight, c10::IValue(bias), stride.vec(), padding.vec(), dilation.vec(), transposed,
              output_padding.vec(), groups, c10::List<bool>({mask[0], mask[1], mask[2]})};
  run_named("aten::convolution_backward", stack);
  const auto result = [&](size_t i) { return stack[i].isTensor() ? stack[i].toTensor() : Tensor(); };
  return {result(0), result(1), result(2)};
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty_memory_format);
  m.impl("empty_strided", empty_strided);
  m.impl("as_strided", at::native::as_strided_tensorimpl);
  m.impl("view", at::native::view);
  m.impl("_reshape_alias", at::native::_reshape_alias);
  m.impl("copy_", copy_);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("_local_scalar_dense", local_scalar_dense);
  m.impl("resize_", resize_);
  m.impl("set_.source_Storage_storage_offset", set_storage_offset);
  m.impl("set_.source_Storage", set_storage);
  m.impl("set_.source_Tensor", set_tensor);
  m.impl("set_", set_none);
  m.impl("record_stream", record_stream);
  m.impl("native_dropout", native_dropout);
  m.impl("convolution_overrideable", convolution);
  m.impl("convolution_backward_overrideable", convolution_backward);
}

// Without the fallthrough `copy_` fails under autocast.
TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
  KERNEL_PRIVATEUSEONE(mm, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(addmm, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(bmm, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(baddbmm, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(matmul, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(linear, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(scaled_dot_product_attention, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(cross_entropy_loss, fp32)
  KERNEL_PRIVATEUSEONE(layer_norm, fp32)
  KERNEL_PRIVATEUSEONE(nll_loss, fp32)
}

}  // namespace
}  // namespace sim
