// Frames of this thread's Python code: read without the GIL where the interpreter's layout of them is known, 3.10 to
// 3.13, from 3.11 on with CPython's internal headers installed; elsewhere through the public API, with the GIL. Only the
// thread itself may read its frames without, and only while it runs no Python code: nothing moves or frees them then.
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

#include <pybind11/pybind11.h>

#include <utility>

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

inline int line_of(PyCodeObject* code, int instruction) {
  return PyCode_Addr2Line(code, instruction * static_cast<int>(sizeof(uint16_t)));
}

// A frame, or none. `instruction` counts code units from the beginning of the code.
#ifdef DTPROF_READS_FRAMES
class Frame {
 public:
  struct Reading {};  // what has to be held while frames are read

  static Frame innermost(PyThreadState* state) {
#if PY_VERSION_HEX < 0x030B0000
    return state->frame;
#elif PY_VERSION_HEX >= 0x030D0000
    return with_code(state->current_frame);
#else
    return state->cframe ? with_code(state->cframe->current_frame) : nullptr;
#endif
  }

  explicit operator bool() const { return frame_; }

#if PY_VERSION_HEX < 0x030B0000
  Frame caller() const { return frame_->f_back; }
  PyCodeObject* code() const { return frame_->f_code; }
  int instruction() const { return frame_->f_lasti; }
#else
  Frame caller() const { return with_code(frame_->previous); }
  PyCodeObject* code() const {
#if PY_VERSION_HEX >= 0x030D0000
    return reinterpret_cast<PyCodeObject*>(frame_->f_executable);
#else
    return frame_->f_code;
#endif
  }
  int instruction() const {
#if PY_VERSION_HEX >= 0x030D0000
    return static_cast<int>(frame_->instr_ptr - _PyCode_CODE(code()));
#else
    return static_cast<int>(frame_->prev_instr - _PyCode_CODE(code()));
#endif
  }
#endif

 private:
#if PY_VERSION_HEX < 0x030B0000
  using Layout = PyFrameObject;
#else
  using Layout = _PyInterpreterFrame;

  // Since 3.12 every call from C into Python begins with a frame that has no code of the program's.
  static const Layout* with_code(const Layout* frame) {
#if PY_VERSION_HEX >= 0x030C0000
    while (frame && frame->owner == FRAME_OWNED_BY_CSTACK) frame = frame->previous;
#endif
    return frame;
  }
#endif
  Frame(const Layout* frame) : frame_(frame) {}

  const Layout* frame_;
};
#else
class Frame {
 public:
  using Reading = pybind11::gil_scoped_acquire;

  static Frame innermost(PyThreadState*) { return PyThreadState_GetFrame(PyThreadState_Get()); }

  Frame(const Frame& other) : frame_(other.frame_) { Py_XINCREF(frame_); }
  Frame& operator=(Frame other) {
    std::swap(frame_, other.frame_);
    return *this;
  }
  ~Frame() { Py_XDECREF(frame_); }

  explicit operator bool() const { return frame_; }
  Frame caller() const { return PyFrame_GetBack(frame_); }
  PyCodeObject* code() const {
    PyCodeObject* code = PyFrame_GetCode(frame_);
    Py_DECREF(code);  // the frame, which has not ended, holds it
    return code;
  }
  int instruction() const { return PyFrame_GetLasti(frame_) / static_cast<int>(sizeof(uint16_t)); }

 private:
  Frame(PyFrameObject* frame) : frame_(frame) {}

  PyFrameObject* frame_;
};
#endif

}  // namespace
}  // namespace dtprof
