// Frames of this thread's Python code, read without the GIL where the interpreter's layout of them is known: 3.11 to 3.13,
// with CPython's internal headers installed. Only the thread itself may read its frames so, and only while it runs no
// Python code: nothing moves or frees them then.
#pragma once

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#if PY_VERSION_HEX >= 0x030B0000 && PY_VERSION_HEX < 0x030E0000 && __has_include(<internal/pycore_frame.h>)
#define DTPROF_READS_FRAMES 1
#define Py_BUILD_CORE 1
#include <internal/pycore_frame.h>
#undef Py_BUILD_CORE

namespace dtprof {
namespace {

using Frame = _PyInterpreterFrame;

// Since 3.12 every call from C into Python begins with a frame that has no code of the program's.
inline const Frame* with_code(const Frame* frame) {
#if PY_VERSION_HEX >= 0x030C0000
  while (frame && frame->owner == FRAME_OWNED_BY_CSTACK) frame = frame->previous;
#endif
  return frame;
}

inline const Frame* innermost_frame(PyThreadState* state) {
#if PY_VERSION_HEX >= 0x030D0000
  return with_code(state->current_frame);
#else
  return state->cframe ? with_code(state->cframe->current_frame) : nullptr;
#endif
}

inline const Frame* caller_of(const Frame* frame) { return with_code(frame->previous); }

inline PyCodeObject* code_of(const Frame* frame) {
#if PY_VERSION_HEX >= 0x030D0000
  return reinterpret_cast<PyCodeObject*>(frame->f_executable);
#else
  return frame->f_code;
#endif
}

// In code units from the beginning of the code.
inline int instruction_of(const Frame* frame) {
#if PY_VERSION_HEX >= 0x030D0000
  return static_cast<int>(frame->instr_ptr - _PyCode_CODE(code_of(frame)));
#else
  return static_cast<int>(frame->prev_instr - _PyCode_CODE(code_of(frame)));
#endif
}

}  // namespace
}  // namespace dtprof
#endif
