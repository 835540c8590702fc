// A PJRT plugin that passes each call on to the plugin in the library TARGET (a macro, the path as a string), which is
// newer than the callers: the options of an execution have fewer fields there than it insists on.

#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <string.h>

#include "pjrt_c_api.h"

static const PJRT_Api* target;
static PJRT_Api api;

static PJRT_Error* execute(PJRT_LoadedExecutable_Execute_Args* args) {
  PJRT_ExecuteOptions* callers = args->options;
  PJRT_ExecuteOptions padded = {0};
  memcpy(&padded, callers, callers->struct_size < sizeof padded ? callers->struct_size : sizeof padded);
  padded.struct_size = sizeof padded;
  args->options = &padded;
  PJRT_Error* error = target->PJRT_LoadedExecutable_Execute(args);
  args->options = callers;
  return error;
}

const PJRT_Api* GetPjrtApi(void) {
  if (target) return &api;
  void* library = dlopen(TARGET, RTLD_NOW | RTLD_LOCAL);
  const PJRT_Api* (*get)(void) = library ? (const PJRT_Api* (*)(void))dlsym(library, "GetPjrtApi") : NULL;
  if (!get) {
    fprintf(stderr, "%s\n", dlerror());
    return NULL;
  }
  target = get();
  api = *target;
  api.PJRT_LoadedExecutable_Execute = execute;
  return &api;
}
