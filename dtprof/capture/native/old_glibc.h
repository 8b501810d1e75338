// Included first in prebuilt hooks: what lets a hook compiled on a newer system load where glibc is 2.28 and libstdc++ that of
// GCC 8, as torch does. x86-64 only. Where this does not suffice, inspection of the wheel fails.
#pragma once

#include <bits/c++config.h>
#undef _GLIBCXX_USE_PTHREAD_COND_CLOCKWAIT  // glibc 2.30

#include <sys/single_threaded.h>  // glibc 2.32: a variable that says whether shared pointers may count without atomics
extern "C" {
__attribute__((visibility("hidden"))) char __libc_single_threaded = 0;
}

#include <dlfcn.h>
#include <pthread.h>
#include <signal.h>
#include <sys/stat.h>

// Moved into libc.so.6 by glibc 2.32 to 2.34, which keep the names under their first version.
__asm__(".symver dlopen, dlopen@GLIBC_2.2.5");
__asm__(".symver dlsym, dlsym@GLIBC_2.2.5");
__asm__(".symver dlerror, dlerror@GLIBC_2.2.5");
__asm__(".symver pthread_sigmask, pthread_sigmask@GLIBC_2.2.5");
__asm__(".symver pthread_getname_np, pthread_getname_np@GLIBC_2.12");
__asm__(".symver pthread_setname_np, pthread_setname_np@GLIBC_2.12");

// Functions since glibc 2.33, before that inline over these. On x86-64 one layout serves files of every size.
extern "C" {
int __xstat(int version, const char* path, struct stat* seen) noexcept;
int __fxstat(int version, int file, struct stat* seen) noexcept;
__attribute__((visibility("hidden"))) int stat(const char* path, struct stat* seen) noexcept {
  return __xstat(1, path, seen);
}
__attribute__((visibility("hidden"))) int fstat(int file, struct stat* seen) noexcept {
  return __fxstat(1, file, seen);
}
}

// Newer libstdc++ than the platform's has these functions, which headers of today call out of line. Libraries of torch export
// their own copies, some of libtorch_cpu.so, some of libtorch.so, some none: a hook has copies of its own, which nobody else sees.
#include <exception>
#include <new>
#include <sstream>

namespace std {
void __throw_bad_array_new_length() { throw bad_array_new_length(); }  // GLIBCXX_3.4.29
template basic_ostringstream<char>::basic_ostringstream();             // GLIBCXX_3.4.26
#if _GLIBCXX_USE_CXX11_ABI
template string basic_stringbuf<char>::str() const&;  // GLIBCXX_3.4.29
template string basic_stringbuf<char>::str() &&;
#endif
}  // namespace std

// CXXABI_1.3.13; since GCC 4.4 the functions that copy and destroy an exception_ptr add and drop one reference each.
__asm__(".symver dtprof_copy_exception, _ZNSt15__exception_ptr13exception_ptrC1ERKS0_@CXXABI_1.3.3");
__asm__(".symver dtprof_drop_exception, _ZNSt15__exception_ptr13exception_ptrD1Ev@CXXABI_1.3.3");
extern "C" {
void dtprof_copy_exception(void** place, void* const* from) noexcept;
void dtprof_drop_exception(void** place) noexcept;
}
namespace std::__exception_ptr {
void exception_ptr::_M_addref() noexcept {
  void* never_dropped;
  dtprof_copy_exception(&never_dropped, &_M_exception_object);
}
void exception_ptr::_M_release() noexcept { dtprof_drop_exception(&_M_exception_object); }
}  // namespace std::__exception_ptr

__asm__(".hidden _ZSt28__throw_bad_array_new_lengthv");
__asm__(".hidden _ZNSt15__exception_ptr13exception_ptr9_M_addrefEv");
__asm__(".hidden _ZNSt15__exception_ptr13exception_ptr10_M_releaseEv");
#if _GLIBCXX_USE_CXX11_ABI
__asm__(".hidden _ZNSt7__cxx1119basic_ostringstreamIcSt11char_traitsIcESaIcEEC1Ev");
__asm__(".hidden _ZNSt7__cxx1119basic_ostringstreamIcSt11char_traitsIcESaIcEEC2Ev");
__asm__(".hidden _ZNOSt7__cxx1115basic_stringbufIcSt11char_traitsIcESaIcEE3strEv");
__asm__(".hidden _ZNKRSt7__cxx1115basic_stringbufIcSt11char_traitsIcESaIcEE3strEv");
#else
__asm__(".hidden _ZNSt19basic_ostringstreamIcSt11char_traitsIcESaIcEEC1Ev");
__asm__(".hidden _ZNSt19basic_ostringstreamIcSt11char_traitsIcESaIcEEC2Ev");
#endif
