// Several ranks: processes of one machine that train together, as the chips of a TPU host do.
//
// A rank is a process. Its client has the CPU devices of all ranks, and shows its own alone. A program over several
// devices is run by each of its ranks, on the devices of all: a rank puts its arguments into memory that all share,
// waits for those of the others, and keeps the results of its own device. So N ranks compute N times as much, and the
// collectives in the program are those of XLA:CPU. What a TPU does when a rank does not come, waiting, this does, too,
// up to a deadline. torch_tpu compiles each program for the devices of all ranks. One without collectives waits for
// nobody, and here runs on all devices with the arguments of this rank.
//
// The launcher makes the shared file, and names it in SHIM_RANKS; torchrun's variables say which rank this is.

#include <fcntl.h>
#include <sched.h>
#include <stdint.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#define MAX_RANKS 8
#define MAX_ARGUMENTS 4096
#define MAX_DIMENSIONS 8
#define MAX_BYTES (64ul << 20)

struct argument {
  PJRT_Buffer_Type type;
  size_t dimension_count, offset, size;
  int64_t dimensions[MAX_DIMENSIONS];
};

struct posted {
  size_t count;
  struct argument arguments[MAX_ARGUMENTS];
  char bytes[MAX_BYTES];
};

struct shared {
  // How often ranks have arrived where a set of them meets; the set is the index, a bit for each rank.
  atomic_long arrived[1 << MAX_RANKS];
  struct posted of[MAX_RANKS];
};

static struct shared* shared;
static int rank, ranks = 1;
static PJRT_Client* the_client;
static PJRT_Device* device_of[MAX_RANKS];
static PJRT_DeviceDescription* description_of[MAX_RANKS];

static void die(const char* what) {
  fprintf(stderr, "stand-in, rank %d: %s\n", rank, what);
  fflush(stderr);
  abort();
}

static void must(PJRT_Error* error, const char* what) {
  if (!error) return;
  PJRT_Error_Message_Args message = {.struct_size = PJRT_Error_Message_Args_STRUCT_SIZE, .error = error};
  target->PJRT_Error_Message(&message);
  fprintf(stderr, "%.*s\n", (int)message.message_size, message.message);
  die(what);
}

static void wait_and_destroy(PJRT_Event* event) {
  if (!event) return;
  PJRT_Event_Await_Args await = {.struct_size = PJRT_Event_Await_Args_STRUCT_SIZE, .event = event};
  must(target->PJRT_Event_Await(&await), "waiting");
  PJRT_Event_Destroy_Args destroy = {.struct_size = PJRT_Event_Destroy_Args_STRUCT_SIZE, .event = event};
  must(target->PJRT_Event_Destroy(&destroy), "destroying an event");
}

// Waits until all ranks of a set have come here as often as this one.
static void meet(unsigned set) {
  const char* given = getenv("SHIM_DEADLINE");
  time_t deadline = time(NULL) + (given ? atoi(given) : 60);
  long size = __builtin_popcount(set), before = atomic_fetch_add(&shared->arrived[set], 1);
  long complete = (before / size + 1) * size;
  for (int tries = 0; atomic_load(&shared->arrived[set]) < complete; tries++) {
    if (tries < 100) {
      sched_yield();
    } else {
      usleep(200);
      if (time(NULL) > deadline) die("the other ranks did not come");
    }
  }
}

static int rank_of(PJRT_Device* device) {
  for (int other = 0; other < ranks; other++)
    if (device_of[other] == device) return other;
  die("a device of no rank");
  return -1;
}

static void join_ranks(void) {
  const char* file = getenv("SHIM_RANKS");
  if (!file || !getenv("WORLD_SIZE") || !getenv("RANK")) return;
  ranks = atoi(getenv("WORLD_SIZE"));
  rank = atoi(getenv("RANK"));
  if (ranks < 2) return;
  if (ranks > MAX_RANKS) die("too many ranks");
  int descriptor = open(file, O_RDWR);
  if (descriptor < 0 || ftruncate(descriptor, sizeof *shared)) die("no shared file");
  shared = mmap(NULL, sizeof *shared, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0);
  if (shared == MAP_FAILED) die("no shared memory");
}

static void note_devices(PJRT_Client* client) {
  the_client = client;
  PJRT_Client_Devices_Args all = {.struct_size = PJRT_Client_Devices_Args_STRUCT_SIZE, .client = client};
  must(target->PJRT_Client_Devices(&all), "devices");
  if (all.num_devices != (size_t)ranks) die("another number of devices than ranks");
  for (int other = 0; other < ranks; other++) {
    device_of[other] = all.devices[other];
    PJRT_Device_GetDescription_Args of = {
        .struct_size = PJRT_Device_GetDescription_Args_STRUCT_SIZE,
        .device = device_of[other],
    };
    must(target->PJRT_Device_GetDescription(&of), "a device's description");
    description_of[other] = of.device_description;
  }
}

// ---- which programs have collectives -----------------------------------------------------------

#define MAX_PROGRAMS 65536
static PJRT_LoadedExecutable* with_collectives[MAX_PROGRAMS];
static atomic_long programs;

static int has_collectives(PJRT_LoadedExecutable* executable) {
  for (long i = 0; i < atomic_load(&programs); i++)
    if (with_collectives[i] == executable) return 1;
  return 0;
}

static void note_collectives(const char* code, size_t size, PJRT_LoadedExecutable* executable) {
  // As StableHLO names them, and as XLA does, in what torch_tpu keeps of a program that another rank has compiled.
  static const char* const names[] = {
      "all_reduce", "all_gather", "all_to_all", "reduce_scatter", "collective_",
      "all-reduce", "all-gather", "all-to-all", "reduce-scatter", "collective-",
  };
  for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
    if (!memmem(code, size, names[i], strlen(names[i]))) continue;
    long place = atomic_fetch_add(&programs, 1);
    if (place >= MAX_PROGRAMS) die("too many programs");
    with_collectives[place] = executable;
    return;
  }
}

static PJRT_Error* load_executable(PJRT_Executable_DeserializeAndLoad_Args* args) {
  PJRT_Error* error = target->PJRT_Executable_DeserializeAndLoad(args);
  if (!error) note_collectives(args->serialized_executable, args->serialized_executable_size, args->loaded_executable);
  return error;
}

static PJRT_Error* destroy_executable(PJRT_LoadedExecutable_Destroy_Args* args) {
  for (long i = 0; i < atomic_load(&programs); i++)
    if (with_collectives[i] == args->executable) with_collectives[i] = NULL;
  return target->PJRT_LoadedExecutable_Destroy(args);
}

// ---- a launch over several ranks ---------------------------------------------------------------

static void post(struct posted* mine, PJRT_Buffer* const* buffers, size_t count) {
  if (count > MAX_ARGUMENTS) die("too many arguments");
  mine->count = count;
  size_t used = 0;
  for (size_t i = 0; i < count; i++) {
    struct argument* to = &mine->arguments[i];
    PJRT_Buffer_ElementType_Args type = {
        .struct_size = PJRT_Buffer_ElementType_Args_STRUCT_SIZE,
        .buffer = buffers[i],
    };
    must(target->PJRT_Buffer_ElementType(&type), "the type of an argument");
    PJRT_Buffer_Dimensions_Args shape = {
        .struct_size = PJRT_Buffer_Dimensions_Args_STRUCT_SIZE,
        .buffer = buffers[i],
    };
    must(target->PJRT_Buffer_Dimensions(&shape), "the shape of an argument");
    if (shape.num_dims > MAX_DIMENSIONS) die("too many dimensions");
    to->type = type.type;
    to->dimension_count = shape.num_dims;
    memcpy(to->dimensions, shape.dims, shape.num_dims * sizeof *shape.dims);
    PJRT_Buffer_ToHostBuffer_Args copy = {
        .struct_size = PJRT_Buffer_ToHostBuffer_Args_STRUCT_SIZE,
        .src = buffers[i],
    };
    // Without a destination it tells the size.
    must(target->PJRT_Buffer_ToHostBuffer(&copy), "the size of an argument");
    to->offset = used;
    to->size = copy.dst_size;
    used += (to->size + 63) / 64 * 64;
    if (used > MAX_BYTES) die("the arguments are too large");
    if (!to->size) continue;
    copy.dst = mine->bytes + to->offset;
    must(target->PJRT_Buffer_ToHostBuffer(&copy), "copying an argument");
    wait_and_destroy(copy.event);
  }
}

// The arguments of another rank, on its device in this process.
static PJRT_Buffer** received(struct posted* own, struct posted* from, int other, size_t count) {
  // A TPU would hang.
  if (from->count != count) die("the ranks launch different programs");
  PJRT_Buffer** buffers = calloc(count + 1, sizeof *buffers);
  if (!buffers) abort();
  for (size_t i = 0; i < count; i++) {
    struct argument* argument = &from->arguments[i];
    struct argument* mine = &own->arguments[i];
    if (argument->size != mine->size || argument->type != mine->type) die("the ranks launch different programs");
    PJRT_Client_BufferFromHostBuffer_Args make = {
        .struct_size = PJRT_Client_BufferFromHostBuffer_Args_STRUCT_SIZE,
        .client = the_client,
        .data = from->bytes + argument->offset,
        .type = argument->type,
        .dims = argument->dimensions,
        .num_dims = argument->dimension_count,
        .host_buffer_semantics = PJRT_HostBufferSemantics_kImmutableOnlyDuringCall,
        .device = device_of[other],
    };
    must(target->PJRT_Client_BufferFromHostBuffer(&make), "receiving an argument");
    wait_and_destroy(make.done_with_host_buffer);
    buffers[i] = make.buffer;
  }
  return buffers;
}

static void free_buffers(PJRT_Buffer** buffers, size_t count) {
  for (size_t i = 0; i < count; i++) {
    PJRT_Buffer_Destroy_Args destroy = {.struct_size = PJRT_Buffer_Destroy_Args_STRUCT_SIZE, .buffer = buffers[i]};
    must(target->PJRT_Buffer_Destroy(&destroy), "destroying a buffer");
  }
}

static size_t output_count(PJRT_LoadedExecutable* loaded) {
  PJRT_LoadedExecutable_GetExecutable_Args of = {
      .struct_size = PJRT_LoadedExecutable_GetExecutable_Args_STRUCT_SIZE,
      .loaded_executable = loaded,
  };
  must(target->PJRT_LoadedExecutable_GetExecutable(&of), "an executable");
  PJRT_Executable_NumOutputs_Args outputs = {
      .struct_size = PJRT_Executable_NumOutputs_Args_STRUCT_SIZE,
      .executable = of.executable,
  };
  must(target->PJRT_Executable_NumOutputs(&outputs), "the number of outputs");
  return outputs.num_outputs;
}

// Launches a program that runs on the devices `over`, of which one is this rank's.
static PJRT_Error* execute_together(PJRT_LoadedExecutable_Execute_Args* args, PJRT_Device* const* over, size_t count) {
  int alone = !has_collectives(args->executable);
  PJRT_Buffer** inputs[MAX_RANKS] = {0};
  PJRT_Buffer** outputs[MAX_RANKS] = {0};
  PJRT_Event* done[MAX_RANKS] = {0};
  size_t results = output_count(args->executable);
  unsigned set = 0;
  for (size_t i = 0; i < count; i++) set |= 1u << rank_of(over[i]);
  // A thread that launches alone leaves what the others read as it is.
  struct posted* own = alone ? calloc(1, sizeof *own) : &shared->of[rank];
  if (!own) abort();
  post(own, args->argument_lists[0], args->num_args);
  if (!alone) meet(set);
  for (size_t i = 0; i < count; i++) {
    int other = rank_of(over[i]);
    inputs[i] = other == rank ? (PJRT_Buffer**)args->argument_lists[0] : received(own, alone ? own : &shared->of[other], other, args->num_args);
    outputs[i] = calloc(results + 1, sizeof *outputs[i]);
    if (!outputs[i]) abort();
  }
  // Before a rank posts its next arguments.
  if (alone) {
    free(own);
  } else {
    meet(set);
  }
  PJRT_LoadedExecutable_Execute_Args all = *args;
  all.argument_lists = (PJRT_Buffer* const* const*)inputs;
  all.output_lists = (PJRT_Buffer** const*)outputs;
  all.num_devices = count;
  all.execute_device = NULL;
  all.device_complete_events = done;
  PJRT_Error* error = target->PJRT_LoadedExecutable_Execute(&all);
  for (size_t i = 0; i < count; i++) {
    int is_mine = rank_of(over[i]) == rank;
    if (!error && is_mine) memcpy((void*)args->output_lists[0], outputs[i], results * sizeof *outputs[i]);
    if (!error && is_mine && args->device_complete_events) {
      args->device_complete_events[0] = done[i];
    } else if (!error) {
      wait_and_destroy(done[i]);
    }
    if (!is_mine) {
      free_buffers(inputs[i], args->num_args);
      if (!error) free_buffers(outputs[i], results);
      free(inputs[i]);
    }
    free(outputs[i]);
  }
  return error;
}

// ---- one device is shown -----------------------------------------------------------------------

static PJRT_Error* addressable_devices(PJRT_Client_AddressableDevices_Args* args) {
  args->addressable_devices = &device_of[rank];
  args->num_addressable_devices = 1;
  return NULL;
}

static PJRT_Error* devices_of(PJRT_LoadedExecutable_AddressableDevices_Args* args) {
  PJRT_Error* error = target->PJRT_LoadedExecutable_AddressableDevices(args);
  if (error || args->num_addressable_devices < 2) return error;
  args->addressable_devices = &device_of[rank];
  args->num_addressable_devices = 1;
  return NULL;
}

static PJRT_Error* is_addressable(PJRT_Device_IsAddressable_Args* args) {
  args->is_addressable = args->device == device_of[rank];
  return NULL;
}

static PJRT_Error* local_hardware_id(PJRT_Device_LocalHardwareId_Args* args) {
  args->local_hardware_id = 0;
  return NULL;
}

static PJRT_Error* process_index(PJRT_Client_ProcessIndex_Args* args) {
  args->process_index = rank;
  return NULL;
}

static PJRT_Error* process_index_of(PJRT_DeviceDescription_ProcessIndex_Args* args) {
  args->process_index = 0;
  for (int other = 0; other < ranks; other++)
    if (description_of[other] == args->device_description) args->process_index = other;
  return NULL;
}

static void show_one_device(PJRT_Api* api) {
  api->PJRT_Client_AddressableDevices = addressable_devices;
  api->PJRT_LoadedExecutable_AddressableDevices = devices_of;
  api->PJRT_Device_IsAddressable = is_addressable;
  api->PJRT_LoadedExecutable_Destroy = destroy_executable;
  api->PJRT_Executable_DeserializeAndLoad = load_executable;
  api->PJRT_Device_LocalHardwareId = local_hardware_id;
  api->PJRT_Client_ProcessIndex = process_index;
  api->PJRT_DeviceDescription_ProcessIndex = process_index_of;
}
