// Frames of this thread's Python code, read without the GIL where the interpreter's layout of them is known: 3.10 to 3.13,
// from 3.11 on with CPython's internal headers installed. Only the thread itself may read its frames so, and only while it runs no
// Python code: nothing moves or frees them then.
#pragma once

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#if PY_VERSION_HEX < 0x030B0000
#define DTPROF_READS_FRAMES 1
#include <frameobject.h>
#elif PY_VERSION_HEX < 0x030E0000 && __has_include(<internal/pycore_frame.h>)
#define DTPROF_READS_FRAMES 1
#define Py_BUILD_CORE 1
#include <internal/pycore_frame.h>
#undef Py_BUILD_CORE
#endif

namespace dtprof {
namespace {

// With the names of enclosing functions and classes from 3.11 on.
inline PyObject* name_of(PyCodeObject* code) {
#if PY_VERSION_HEX >= 0x030B0000
  return code->co_qualname;
#else
  return code->co_name;
#endif
}

#ifdef DTPROF_READS_FRAMES
#if PY_VERSION_HEX < 0x030B0000
using Frame = PyFrameObject;
inline const Frame* innermost_frame(PyThreadState* state) { return state->frame; }
inline const Frame* caller_of(const Frame* frame) { return frame->f_back; }
inline PyCodeObject* code_of(const Frame* frame) { return frame->f_code; }
inline int instruction_of(const Frame* frame) { return frame->f_lasti; }  // in code units from the beginning of the code
#else
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

inline int instruction_of(const Frame* frame) {
#if PY_VERSION_HEX >= 0x030D0000
  return static_cast<int>(frame->instr_ptr - _PyCode_CODE(code_of(frame)));
#else
  return static_cast<int>(frame->prev_instr - _PyCode_CODE(code_of(frame)));
#endif
}
#endif
#endif

}  // namespace
}  // namespace dtprof
