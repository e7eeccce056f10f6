/* A C function as an XLA custom call: its errors, its attributes, and XLA's threads as its helpers. Knows nothing of what
   is computed. */
#pragma once
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "xla/ffi/api/c_api.h"

/* Tasks 0 .. num_tasks - 1, taken in this order by whoever comes. Lies at the beginning of one allocation, which whoever
   leaves last gives back. */
struct crew {
  void (*run_task)(struct crew *, int64_t task, int worker);
  int64_t num_tasks;
  atomic_llong next, done;
  atomic_int workers, users;
};

static void crew_init(struct crew *crew, void (*run_task)(struct crew *, int64_t, int), int64_t num_tasks) {
  crew->run_task = run_task;
  crew->num_tasks = num_tasks;
  atomic_init(&crew->next, 0);
  atomic_init(&crew->done, 0);
  atomic_init(&crew->workers, 0);
  atomic_init(&crew->users, 1);
}

static void take_tasks(struct crew *crew) {
  const int worker = atomic_fetch_add(&crew->workers, 1);
  for (int64_t i; (i = atomic_fetch_add(&crew->next, 1)) < crew->num_tasks; atomic_fetch_add(&crew->done, 1))
    crew->run_task(crew, i, worker);
}

static void leave(struct crew *crew) {
  if (atomic_fetch_sub(&crew->users, 1) == 1) free(crew);
}

static void help(void *crew) {
  take_tasks(crew);
  leave(crew);
}

static XLA_FFI_Error *failure(const XLA_FFI_CallFrame *frame, XLA_FFI_Error_Code code, const char *message) {
  XLA_FFI_Error_Create_Args args = {
      .struct_size = XLA_FFI_Error_Create_Args_STRUCT_SIZE, .message = message, .errc = code};
  return frame->api->XLA_FFI_Error_Create(&args);
}

static void forget(const XLA_FFI_CallFrame *frame, XLA_FFI_Error *error) {
  XLA_FFI_Error_Destroy_Args args = {.struct_size = XLA_FFI_Error_Destroy_Args_STRUCT_SIZE, .error = error};
  frame->api->XLA_FFI_Error_Destroy(&args);
}

/* The most workers that a crew can have. */
static int64_t threads_of(const XLA_FFI_CallFrame *frame) {
  int64_t threads = 1;
  XLA_FFI_ThreadPool_NumThreads_Args args = {
      .struct_size = XLA_FFI_ThreadPool_NumThreads_Args_STRUCT_SIZE, .ctx = frame->ctx, .num_threads = &threads};
  XLA_FFI_Error *error = frame->api->XLA_FFI_ThreadPool_NumThreads(&args);
  if (error) forget(frame, error);
  return threads;
}

/* Has XLA's threads help, and returns when all is done. They may come late or never: nobody is waited for but those
   who are computing. */
static void run(const XLA_FFI_CallFrame *frame, struct crew *crew, int64_t helpers) {
  for (int64_t i = 0; i < helpers; i++) {
    XLA_FFI_ThreadPool_Schedule_Args args = {
        .struct_size = XLA_FFI_ThreadPool_Schedule_Args_STRUCT_SIZE, .ctx = frame->ctx, .task = help, .data = crew};
    atomic_fetch_add(&crew->users, 1);
    XLA_FFI_Error *error = frame->api->XLA_FFI_ThreadPool_Schedule(&args);
    if (error) {
      atomic_fetch_sub(&crew->users, 1);
      forget(frame, error);
    }
  }
  take_tasks(crew);
  while (atomic_load(&crew->done) < crew->num_tasks) sched_yield();
  leave(crew);
}

static const void *attribute(const XLA_FFI_CallFrame *frame, const char *name) {
  for (int64_t i = 0; i < frame->attrs.size; i++) {
    const XLA_FFI_ByteSpan *span = frame->attrs.names[i];
    if (span->len == strlen(name) && !memcmp(span->ptr, name, span->len))
      return ((const XLA_FFI_Scalar *)frame->attrs.attrs[i])->value;
  }
  abort(); /* the Python beside passes all of them */
}

/* Whether XLA only asks for the call's version; it is answered then. */
static int is_question(const XLA_FFI_CallFrame *frame) {
  if (!frame->extension_start || frame->extension_start->type != XLA_FFI_Extension_Metadata) return 0;
  XLA_FFI_Metadata *metadata = ((XLA_FFI_Metadata_Extension *)frame->extension_start)->metadata;
  metadata->api_version.major_version = XLA_FFI_API_MAJOR;
  metadata->api_version.minor_version = XLA_FFI_API_MINOR;
  metadata->traits = 0;
  metadata->state_type_id.type_id = 0;
  return 1;
}
