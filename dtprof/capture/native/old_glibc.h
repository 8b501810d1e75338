// Included first in prebuilt hooks: what lets a hook compiled on a newer system load where glibc is 2.28, as torch does.
// x86-64 only. Where this does not suffice, inspection of the wheel fails.
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
