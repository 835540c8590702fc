// A PJRT plugin in libtpu's place: it computes on the CPU, by the plugin in the library TARGET (a macro, the path as a
// string), and answers as libtpu does on SHIM_DEVICES devices (a variable).
//
// If the variable SHIM_ANSWERS names a file, its texts, each ended by a zero byte, are the minor version of the API, the
// platform's name and version, and the kind and the text of each device.

// What it does not answer itself shim.c passes on.
#define GetPjrtApi passing_on
#include "shim.c"
#undef GetPjrtApi

#include <stdlib.h>

static PJRT_Client* ahead;
static char answers[1 << 20];

static const char* answer(int number) {
  const char* at = answers;
  while (number--) at += strlen(at) + 1;
  return at;
}

static PJRT_Error* create_client(PJRT_Client_Create_Args* args) {
  PJRT_NamedValue count = {.struct_size = PJRT_NamedValue_STRUCT_SIZE, .name = "cpu_device_count", .value_size = 1};
  count.name_size = strlen(count.name);
  count.type = PJRT_NamedValue_kInt64;
  count.int64_value = atoi(getenv("SHIM_DEVICES"));
  args->create_options = &count;
  args->num_options = 1;
  return target->PJRT_Client_Create(args);
}

static PJRT_Error* client_name(PJRT_Client_PlatformName_Args* args) {
  args->platform_name = "tpu";
  args->platform_name_size = 3;
  return NULL;
}

// ---- what libtpu can do without devices ----

static PJRT_Error* create_topology(PJRT_TopologyDescription_Create_Args* args) {
  PJRT_Client_Create_Args made = {.struct_size = PJRT_Client_Create_Args_STRUCT_SIZE};
  PJRT_Error* error = create_client(&made);
  if (error) return error;
  ahead = made.client;
  PJRT_Client_TopologyDescription_Args found = {.struct_size = PJRT_Client_TopologyDescription_Args_STRUCT_SIZE};
  found.client = ahead;
  error = target->PJRT_Client_TopologyDescription(&found);
  args->topology = found.topology;
  return error;
}

static PJRT_Error* compile_ahead(PJRT_Compile_Args* args) {
  PJRT_Client_Compile_Args compiled = {.struct_size = PJRT_Client_Compile_Args_STRUCT_SIZE, .client = ahead};
  compiled.program = args->program;
  compiled.compile_options = args->compile_options;
  compiled.compile_options_size = args->compile_options_size;
  PJRT_Error* error = target->PJRT_Client_Compile(&compiled);
  if (error) return error;
  PJRT_LoadedExecutable_GetExecutable_Args got = {.struct_size = PJRT_LoadedExecutable_GetExecutable_Args_STRUCT_SIZE};
  got.loaded_executable = compiled.executable;
  error = target->PJRT_LoadedExecutable_GetExecutable(&got);
  args->executable = got.executable;
  return error;
}

// ---- what libtpu says of a slice ----

static PJRT_Error* platform_name(PJRT_TopologyDescription_PlatformName_Args* args) {
  args->platform_name = answer(1);
  args->platform_name_size = strlen(args->platform_name);
  return NULL;
}

static PJRT_Error* platform_version(PJRT_TopologyDescription_PlatformVersion_Args* args) {
  args->platform_version = answer(2);
  args->platform_version_size = strlen(args->platform_version);
  return NULL;
}

static int id_of(PJRT_DeviceDescription* device) {
  PJRT_DeviceDescription_Id_Args args = {.struct_size = PJRT_DeviceDescription_Id_Args_STRUCT_SIZE};
  args.device_description = device;
  target->PJRT_DeviceDescription_Id(&args);
  return args.id;
}

static PJRT_Error* kind(PJRT_DeviceDescription_Kind_Args* args) {
  args->device_kind = answer(3 + 2 * id_of(args->device_description));
  args->device_kind_size = strlen(args->device_kind);
  return NULL;
}

static PJRT_Error* text(PJRT_DeviceDescription_ToString_Args* args) {
  args->to_string = answer(4 + 2 * id_of(args->device_description));
  args->to_string_size = strlen(args->to_string);
  return NULL;
}

const PJRT_Api* GetPjrtApi(void) {
  if (target) return &api;
  if (!passing_on()) return NULL;
  api.PJRT_Client_Create = create_client;
  api.PJRT_Client_PlatformName = client_name;
  api.PJRT_TopologyDescription_Create = create_topology;
  api.PJRT_Compile = compile_ahead;
  FILE* file = getenv("SHIM_ANSWERS") ? fopen(getenv("SHIM_ANSWERS"), "rb") : NULL;
  if (file) {
    (void)!fread(answers, 1, sizeof answers - 1, file);
    fclose(file);
    api.pjrt_api_version.minor_version = atoi(answer(0));
    api.PJRT_TopologyDescription_PlatformName = platform_name;
    api.PJRT_TopologyDescription_PlatformVersion = platform_version;
    api.PJRT_DeviceDescription_Kind = kind;
    api.PJRT_DeviceDescription_ToString = text;
  }
  return &api;
}
