// Returns its first argument after a sleep of `milliseconds`, which uses no core. The second argument only orders calls.
#include <chrono>
#include <cstring>
#include <thread>

#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace {

ffi::Error Sleep(ffi::AnyBuffer x, ffi::AnyBuffer /*awaited*/, ffi::Result<ffi::AnyBuffer> y, double milliseconds) {
  std::this_thread::sleep_for(std::chrono::duration<double, std::milli>(milliseconds));
  std::memcpy(y->untyped_data(), x.untyped_data(), x.size_bytes());
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(
    SleepHandler, Sleep,
    ffi::Ffi::Bind().Arg<ffi::AnyBuffer>().Arg<ffi::AnyBuffer>().Ret<ffi::AnyBuffer>().Attr<double>("milliseconds"));
