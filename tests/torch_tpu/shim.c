// A PJRT plugin for torch_tpu on a machine without TPU: passes each call on to the CPU plugin in the library TARGET (a
// macro, the path as a string), and makes up for what a CPU plugin does not have:
//
// - Client options. torch_tpu sends those of a TPU; a CPU plugin refuses a client with an option it does not know.
// - The memory kinds of an executable's outputs, which torch_tpu asks for when it compiles. XLA:CPU does not implement
//   the question. There is one kind, "device".
//
// It counts what passes through, for `stand_in.counts()`, and has launches fail as on a device without free memory, for
// `stand_in.fail_launch()`. Several processes can be the ranks of one training; see `shim_ranks.h`.
//
// The header may be older than both sides, so nothing here depends on the size that it gives a struct.

#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "pjrt_c_api.h"

static const PJRT_Api* target;

#include "shim_ranks.h"

atomic_long shim_compiles, shim_executions, shim_transfers_to_device, shim_transfers_to_host;
// The launch that fails: 1 is the next one; 0 is none.
atomic_long shim_fails_at;

#define COUNTED(function, counter)                                \
  static PJRT_Error* counted_##function(function##_Args* args) { \
    atomic_fetch_add(&counter, 1);                                \
    return target->function(args);                                \
  }

static PJRT_Error* compile(PJRT_Client_Compile_Args* args) {
  atomic_fetch_add(&shim_compiles, 1);
  PJRT_Error* error = target->PJRT_Client_Compile(args);
  if (!error && ranks > 1) note_collectives(args->program->code, args->program->code_size, args->executable);
  return error;
}

COUNTED(PJRT_Client_BufferFromHostBuffer, shim_transfers_to_device)
COUNTED(PJRT_Buffer_ToHostBuffer, shim_transfers_to_host)

// An error that the target makes, with another code and message.
static _Atomic(PJRT_Error*) full;

static PJRT_Error* execute(PJRT_LoadedExecutable_Execute_Args* args) {
  if (atomic_load(&shim_fails_at) > 0 && atomic_fetch_sub(&shim_fails_at, 1) == 1) {
    PJRT_Executable_NumOutputs_Args refused = {.struct_size = 0};
    full = target->PJRT_Executable_NumOutputs(&refused);
    return full;
  }
  atomic_fetch_add(&shim_executions, 1);
  if (ranks > 1) {
    PJRT_LoadedExecutable_AddressableDevices_Args over = {
        .struct_size = PJRT_LoadedExecutable_AddressableDevices_Args_STRUCT_SIZE,
        .executable = args->executable,
    };
    must(target->PJRT_LoadedExecutable_AddressableDevices(&over), "the devices of an executable");
    if (over.num_addressable_devices > 1)
      return execute_together(args, over.addressable_devices, over.num_addressable_devices);
  }
  return target->PJRT_LoadedExecutable_Execute(args);
}

static void error_message(PJRT_Error_Message_Args* args) {
  static const char text[] = "RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm.";
  target->PJRT_Error_Message(args);
  if (args->error == full) {
    args->message = text;
    args->message_size = strlen(text);
  }
}

static PJRT_Error* error_code(PJRT_Error_GetCode_Args* args) {
  PJRT_Error* error = target->PJRT_Error_GetCode(args);
  if (args->error == full) args->code = PJRT_Error_Code_RESOURCE_EXHAUSTED;
  return error;
}

// What `GetPjrtApi` returns.
static PJRT_Api* api;

static PJRT_Error* create_client(PJRT_Client_Create_Args* args) {
  const PJRT_NamedValue* callers = args->create_options;
  size_t count = args->num_options;
  join_ranks();
  const PJRT_NamedValue devices = {
      .struct_size = PJRT_NamedValue_STRUCT_SIZE,
      .name = "cpu_device_count",
      .name_size = strlen("cpu_device_count"),
      .type = PJRT_NamedValue_kInt64,
      .int64_value = ranks,
      .value_size = 1,
  };
  args->create_options = &devices;
  args->num_options = 1;
  PJRT_Error* error = target->PJRT_Client_Create(args);
  args->create_options = callers;
  args->num_options = count;
  if (!error && ranks > 1) {
    note_devices(args->client);
    show_one_device(api);
  }
  return error;
}

static void destroy(PJRT_Error* error) {
  PJRT_Error_Destroy_Args args = {.struct_size = PJRT_Error_Destroy_Args_STRUCT_SIZE, .error = error};
  target->PJRT_Error_Destroy(&args);
}

// The arrays of an answer belong to the plugin and stay valid; they are made for the largest executable so far.
static PJRT_Error* output_memory_kinds(PJRT_Executable_OutputMemoryKinds_Args* args) {
  static const char* const kind = "device";
  static const char** kinds;
  static size_t* sizes;
  static size_t room;
  PJRT_Error* error = target->PJRT_Executable_OutputMemoryKinds(args);
  if (!error) return NULL;
  destroy(error);
  PJRT_Executable_NumOutputs_Args outputs = {
      .struct_size = PJRT_Executable_NumOutputs_Args_STRUCT_SIZE,
      .executable = args->executable,
  };
  error = target->PJRT_Executable_NumOutputs(&outputs);
  if (error) return error;
  if (outputs.num_outputs > room) {
    // The old arrays are left: another thread may still read them.
    room = outputs.num_outputs;
    kinds = malloc(room * sizeof *kinds);
    sizes = malloc(room * sizeof *sizes);
    if (!kinds || !sizes) abort();
    for (size_t i = 0; i < room; i++) {
      kinds[i] = kind;
      sizes[i] = strlen(kind);
    }
  }
  args->num_outputs = outputs.num_outputs;
  args->memory_kinds = kinds;
  args->memory_kind_sizes = sizes;
  return NULL;
}

const PJRT_Api* GetPjrtApi(void) {
  if (api) return api;
  void* library = dlopen(TARGET, RTLD_NOW | RTLD_LOCAL);
  const PJRT_Api* (*get)(void) = library ? (const PJRT_Api* (*)(void))dlsym(library, "GetPjrtApi") : NULL;
  if (!get) {
    fprintf(stderr, "%s\n", dlerror());
    return NULL;
  }
  target = get();
  api = malloc(target->struct_size);
  if (!api) abort();
  memcpy(api, target, target->struct_size);
  api->PJRT_Client_Create = create_client;
  api->PJRT_Client_Compile = compile;
  api->PJRT_LoadedExecutable_Execute = execute;
  api->PJRT_Error_Message = error_message;
  api->PJRT_Error_GetCode = error_code;
  api->PJRT_Client_BufferFromHostBuffer = counted_PJRT_Client_BufferFromHostBuffer;
  api->PJRT_Buffer_ToHostBuffer = counted_PJRT_Buffer_ToHostBuffer;
  api->PJRT_Executable_OutputMemoryKinds = output_memory_kinds;
  return api;
}
