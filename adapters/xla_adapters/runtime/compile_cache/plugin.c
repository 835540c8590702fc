// A PJRT plugin that wraps another one and keeps compiled programs in a folder, so that a later process loads them.
//
// PJRT is the interface between a framework (torch_xla) and a device (a "plugin": a library with the function
// GetPjrtApi, which returns a table of functions). Ours returns a copy of the other plugin's table with one or two
// functions exchanged:
//
// - Client_Compile looks for the program in the folder first. Found: the other plugin loads it. Not found, or damaged:
//   the other plugin compiles it, and it is written.
// - LoadedExecutable_Execute pads the options of an execution to the size that a plugin newer than torch_xla expects.
//
// A process loads an entry if it would have compiled the same program: the file's name is a SHA-256 of all that a
// compiled program depends on (see `key_of`). Whatever goes wrong with an entry, the program is compiled as if it were not there.
//
// The layouts below follow the PJRT C API (xla/pjrt/c/pjrt_c_api.h in https://github.com/openxla/xla, major version 0,
// in which fields and functions are only ever added at an end). tests/runtime/test_compile_cache.py compares them with that header.
// 64-bit systems only.

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

// ---- the PJRT C API, as far as it is used -----------------------------------------------------------------------

// Each function takes one struct, which begins with its size and a list of extensions, and returns an error or NULL.
typedef void* Error;
typedef Error Function(void* arguments);

// Positions in the table of functions.
enum {
  ERROR_DESTROY = 0,
  ERROR_MESSAGE = 1,
  PLUGIN_INITIALIZE = 3,
  CLIENT_CREATE = 10,
  CLIENT_PLATFORM_NAME = 12,
  CLIENT_COMPILE = 20,
  DEVICE_DESCRIPTION_KIND = 26,
  DEVICE_DESCRIPTION_TO_STRING = 28,
  EXECUTABLE_DESTROY = 40,
  EXECUTABLE_SERIALIZE = 49,
  LOADED_EXECUTABLE_GET_EXECUTABLE = 51,
  LOADED_EXECUTABLE_EXECUTE = 55,
  EXECUTABLE_DESERIALIZE_AND_LOAD = 56,
  TOPOLOGY_CREATE = 82,
  TOPOLOGY_PLATFORM_NAME = 84,
  TOPOLOGY_PLATFORM_VERSION = 85,
  TOPOLOGY_DEVICE_DESCRIPTIONS = 86,
  COMPILE_AHEAD = 89,
  CLIENT_TOPOLOGY = 95,
};

struct api {
  size_t size;
  void* extensions;
  size_t version_size;
  void* version_extensions;
  int major, minor;
  Function* functions[];
};

struct destroy_args {  // Error_Destroy, Executable_Destroy
  size_t size;
  void* extensions;
  void* object;
};

// Error_Message, Client_PlatformName, TopologyDescription_PlatformName and _PlatformVersion, DeviceDescription_Kind and
// _ToString
struct text_args {
  size_t size;
  void* extensions;
  const void* object;
  const char* text;
  size_t length;
};

struct topology_args {
  size_t size;
  void* extensions;
  void* client;
  void* topology;
};

struct descriptions_args {
  size_t size;
  void* extensions;
  const void* topology;
  void* const* descriptions;
  size_t count;
};

struct initialize_args {
  size_t size;
  void* extensions;
};

enum { TEXT = 0, NUMBER = 1, NUMBERS = 2 };

struct option {
  size_t size;
  void* extensions;
  const char* name;
  size_t name_size;
  int kind;
  union {
    const void* pointer;
    int64_t number;
  } value;
  size_t count;
};

struct create_client_args {
  size_t size;
  void* extensions;
  const struct option* options;
  size_t option_count;
  void* callbacks[4];
  void* client;
  void* more_callbacks[2];
};

struct create_topology_args {
  size_t size;
  void* extensions;
  const char* name;
  size_t name_size;
  const struct option* options;
  size_t option_count;
  void* topology;
};

struct program {
  size_t size;
  void* extensions;
  const char* code;
  size_t code_size;
  const char* format;
  size_t format_size;
};

struct compile_args {
  size_t size;
  void* extensions;
  void* client;
  const struct program* program;
  const char* options;
  size_t options_size;
  void* executable;
};

struct compile_ahead_args {
  size_t size;
  void* extensions;
  const void* topology;
  const struct program* program;
  const char* options;
  size_t options_size;
  void* client;
  void* executable;
};

struct get_executable_args {
  size_t size;
  void* extensions;
  void* loaded;
  void* executable;
};

struct serialize_args {
  size_t size;
  void* extensions;
  const void* executable;
  const char* bytes;
  size_t length;
  void* owner;
  void (*free_owner)(void* owner);
};

struct load_args {
  size_t size;
  void* extensions;
  void* client;
  const char* bytes;
  size_t length;
  void* executable;
  const char* options;
  size_t options_size;
};

struct execute_args {
  size_t size;
  void* extensions;
  void* executable;
  void* options;
  void* const* const* arguments;
  size_t device_count, argument_count;
  void** const* outputs;
  void** events;
  void* device;
};

// ---- state ------------------------------------------------------------------------------------------------------

static const struct api* wrapped;
static struct api* ours;
static char* plugin_path;
static char* identity;
// The folder, -1 for none, and whether entries are written to it.
static int folder = -1;
static int writes;
static int pads_options;
// Of a stand-in for TPUs (see `cache_record`): how many devices it has; 0 if this is none.
static int64_t stand_ins;

// Read by Python: programs loaded, compiled, written, and entries that could not be used.
atomic_long cache_loaded, cache_compiled, cache_written, cache_rejected;
// Of the last programs that were asked for, in order: 1 for one that was loaded, 0 for one that was compiled.
#define LOGGED 4096
char cache_log[LOGGED];
atomic_long cache_asked;
// Of what Python calls and reads here; `library.py` compares it.
int cache_interface = 2;
// XLA_FLAGS and LIBTPU_INIT_ARGS as they were when the runtime started.
char* cache_flags[2];
// Why the last entry could not be used or written; empty if all went well.
char cache_problem[512];

static void note_problem(const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(cache_problem, sizeof cache_problem, format, arguments);
  va_end(arguments);
}

static void destroy(int function, void* object) {
  struct destroy_args args = {.size = sizeof args, .object = object};
  wrapped->functions[function](&args);
}

// Whether a call went well; what an error says is noted after `what`, unless that is NULL.
static int went_well(Error error, const char* what) {
  if (!error) return 1;
  struct text_args said = {.size = sizeof said, .object = error};
  wrapped->functions[ERROR_MESSAGE](&said);
  if (what) note_problem("%s: %.*s", what, (int)said.length, said.text);
  destroy(ERROR_DESTROY, error);
  return 0;
}

// ---- SHA-256 (FIPS 180-4) ---------------------------------------------------------------------------------------

struct sha256 {
  uint32_t state[8];
  uint8_t block[64];
  uint64_t length;
};

static const uint32_t ROUNDS[64] = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};

static uint32_t rotated(uint32_t x, int n) { return x >> n | x << (32 - n); }

static void sha256_block(struct sha256* hash, const uint8_t* bytes) {
  uint32_t w[64], s[8];
  for (int i = 0; i < 16; i++)
    w[i] = (uint32_t)bytes[4 * i] << 24 | bytes[4 * i + 1] << 16 | bytes[4 * i + 2] << 8 | bytes[4 * i + 3];
  for (int i = 16; i < 64; i++) {
    uint32_t a = w[i - 15], b = w[i - 2];
    w[i] = w[i - 16] + (rotated(a, 7) ^ rotated(a, 18) ^ a >> 3) + w[i - 7] + (rotated(b, 17) ^ rotated(b, 19) ^ b >> 10);
  }
  memcpy(s, hash->state, sizeof s);
  for (int i = 0; i < 64; i++) {
    uint32_t sum1 = rotated(s[4], 6) ^ rotated(s[4], 11) ^ rotated(s[4], 25);
    uint32_t chosen = (s[4] & s[5]) ^ (~s[4] & s[6]);
    uint32_t one = s[7] + sum1 + chosen + ROUNDS[i] + w[i];
    uint32_t sum0 = rotated(s[0], 2) ^ rotated(s[0], 13) ^ rotated(s[0], 22);
    uint32_t most = (s[0] & s[1]) ^ (s[0] & s[2]) ^ (s[1] & s[2]);
    memmove(s + 1, s, 7 * sizeof *s);
    s[4] += one;
    s[0] = one + sum0 + most;
  }
  for (int i = 0; i < 8; i++) hash->state[i] += s[i];
}

static void sha256_begin(struct sha256* hash) {
  static const uint32_t start[8] = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                                    0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
  memcpy(hash->state, start, sizeof start);
  hash->length = 0;
}

static void sha256_add(struct sha256* hash, const void* data, size_t size) {
  const uint8_t* bytes = data;
  size_t held = hash->length % 64;
  hash->length += size;
  if (held) {
    size_t taken = size < 64 - held ? size : 64 - held;
    memcpy(hash->block + held, bytes, taken);
    if (held + taken < 64) return;
    sha256_block(hash, hash->block);
    bytes += taken;
    size -= taken;
  }
  for (; size >= 64; bytes += 64, size -= 64) sha256_block(hash, bytes);
  memcpy(hash->block, bytes, size);
}

static void sha256_end(struct sha256* hash, uint8_t digest[32]) {
  static const uint8_t padding[64] = {0x80};
  uint64_t bits = hash->length * 8;
  uint8_t big_endian[8];
  for (int i = 0; i < 8; i++) big_endian[i] = bits >> (56 - 8 * i);
  sha256_add(hash, padding, 1 + (119 - hash->length % 64) % 64);
  sha256_add(hash, big_endian, 8);
  for (int i = 0; i < 32; i++) digest[i] = hash->state[i / 4] >> (24 - 8 * (i % 4));
}

// ---- canonical form ---------------------------------------------------------------------------------------------
//
// Programs and options are messages of protocol buffers. The entries of a map field follow one another in an order that
// differs from process to process, so they are sorted. All else has one order.
// Encoding: https://protobuf.dev/programming-guides/encoding

struct field {
  uint32_t number;
  int is_map;
  const struct field* inside;  // the fields of interest in a message; ends with number 0
};

static const struct field FRONTEND_ATTRIBUTES[] = {{1, 1, NULL}, {0}};
static const struct field INSTRUCTION[] = {{68, 0, FRONTEND_ATTRIBUTES}, {0}};
static const struct field COMPUTATION[] = {{2, 0, INSTRUCTION}, {0}};
static const struct field SCHEDULE[] = {{1, 1, NULL}, {0}};
// xla.HloModuleProto
static const struct field MODULE[] = {{3, 0, COMPUTATION}, {7, 0, SCHEDULE}, {19, 0, FRONTEND_ATTRIBUTES}, {0}};

static const struct field TUNING_KNOBS[] = {{4, 1, NULL}, {0}};
static const struct field FAILURE[] = {{15, 0, TUNING_KNOBS}, {0}};
static const struct field AUTOTUNE_RESULT[] = {{7, 0, FAILURE}, {16, 0, TUNING_KNOBS}, {0}};
static const struct field AUTOTUNE_ENTRY[] = {{3, 0, AUTOTUNE_RESULT}, {0}};
static const struct field AUTOTUNE_RESULTS[] = {{4, 0, AUTOTUNE_ENTRY}, {0}};
static const struct field TARGET[] = {{6, 0, AUTOTUNE_RESULTS}, {0}};
static const struct field DEBUG_OPTIONS[] = {{357, 1, NULL}, {500, 1, NULL}, {0}};
static const struct field BUILD_OPTIONS[] = {{3, 0, DEBUG_OPTIONS}, {0}};
// xla.CompileOptionsProto
static const struct field OPTIONS[] = {{3, 0, BUILD_OPTIONS}, {7, 1, NULL}, {8, 0, TARGET}, {0}};

struct span {
  const char* start;
  size_t size;
};

// Reads a number of variable length; NULL if the message ends before it.
static const char* read_number(const char* at, const char* end, uint64_t* number) {
  *number = 0;
  for (int shift = 0; at < end && shift < 64; shift += 7) {
    uint8_t byte = *at++;
    *number |= (uint64_t)(byte & 127) << shift;
    if (byte < 128) return at;
  }
  return NULL;
}

static int compare_spans(const void* one, const void* other) {
  const struct span *a = one, *b = other;
  int order = memcmp(a->start, b->start, a->size < b->size ? a->size : b->size);
  return order ? order : (a->size > b->size) - (a->size < b->size);
}

// Sorts a run of `count` entries that lie one after another from `start`.
static int sort_run(char* start, struct span* entries, size_t count) {
  size_t size = 0;
  for (size_t i = 0; i < count; i++) size += entries[i].size;
  char *sorted = malloc(size), *to = sorted;
  if (!sorted) return 0;
  qsort(entries, count, sizeof *entries, compare_spans);
  for (size_t i = 0; i < count; i++) to = mempcpy(to, entries[i].start, entries[i].size);
  memcpy(start, sorted, size);
  free(sorted);
  return 1;
}

// Sorts the map fields of a message in place; 0 if it is no such message, or memory is missing.
static int make_canonical(char* message, size_t size, const struct field* known) {
  const char *at = message, *end = message + size;
  struct span* run = NULL;
  size_t count = 0, room = 0;
  uint64_t run_tag = 0;
  int fine = 1;
  while (fine && at < end) {
    const char* start = at;
    uint64_t tag, length = 0;
    if (!(at = read_number(at, end, &tag))) break;
    int kind = tag & 7;
    if (kind == 0) at = read_number(at, end, &length);
    else if (kind == 1) at = end - at >= 8 ? at + 8 : NULL;
    else if (kind == 5) at = end - at >= 4 ? at + 4 : NULL;
    else if (kind != 2 || !(at = read_number(at, end, &length)) || length > (uint64_t)(end - at)) at = NULL;
    else at += length;
    if (!at) break;
    const struct field* field = known;
    while (kind == 2 && field->number && field->number != tag >> 3) field++;
    int in_map = kind == 2 && field->number && field->is_map;
    if (kind == 2 && field->number && field->inside)
      fine = make_canonical((char*)at - length, length, field->inside);
    if (count && (!in_map || tag != run_tag)) {
      fine = fine && sort_run((char*)run[0].start, run, count);
      count = 0;
    }
    if (in_map) {
      if (count == room) {
        struct span* more = realloc(run, (room = room ? 2 * room : 8) * sizeof *run);
        if (!more) {
          fine = 0;
          break;
        }
        run = more;
      }
      run[count++] = (struct span){start, at - start};
      run_tag = tag;
    }
  }
  if (fine && at && count) fine = sort_run((char*)run[0].start, run, count);
  free(run);
  return fine && at;
}

// ---- keys -------------------------------------------------------------------------------------------------------

// With its length, so that two neighbours cannot be mistaken for two others.
static void add_part(struct sha256* hash, const char* bytes, size_t size) {
  uint64_t length = size;
  sha256_add(hash, &length, sizeof length);
  sha256_add(hash, bytes, size);
}

static void add_message(struct sha256* hash, const char* bytes, size_t size, const struct field* known) {
  char* copy = malloc(size + 1);
  if (copy) memcpy(copy, bytes, size);
  // A message that cannot be parsed is hashed unsorted.
  add_part(hash, copy && make_canonical(copy, size, known) ? copy : bytes, size);
  free(copy);
}

static int add_text(struct sha256* hash, int function, const void* object) {
  struct text_args args = {.size = sizeof args, .object = object};
  if (!went_well(wrapped->functions[function](&args), "programs are not kept")) return 0;
  add_part(hash, args.text, args.length);
  return 1;
}

// The devices: platform, version of the compiler, and the kind, place and number of each.
static int add_topology(struct sha256* hash, const void* topology) {
  struct descriptions_args devices = {.size = sizeof devices, .topology = topology};
  if (!add_text(hash, TOPOLOGY_PLATFORM_NAME, topology)) return 0;
  if (!add_text(hash, TOPOLOGY_PLATFORM_VERSION, topology)) return 0;
  if (!went_well(wrapped->functions[TOPOLOGY_DEVICE_DESCRIPTIONS](&devices), "programs are not kept")) return 0;
  for (size_t i = 0; i < devices.count; i++) {
    if (!add_text(hash, DEVICE_DESCRIPTION_KIND, devices.descriptions[i])) return 0;
    if (!add_text(hash, DEVICE_DESCRIPTION_TO_STRING, devices.descriptions[i])) return 0;
  }
  return 1;
}

// All that a compiled program depends on; 0 if the plugin does not tell.
static int key_of(const struct program* program, const char* options, size_t options_size, const void* topology,
                  uint8_t key[32]) {
  struct sha256 hash;
  int version[2] = {wrapped->major, wrapped->minor};
  sha256_begin(&hash);
  add_part(&hash, identity, strlen(identity));
  for (int i = 0; i < 2; i++) {
    const char* first = cache_flags[i] + strspn(cache_flags[i], " \t\n");
    if (*first && *first != '-') {
      // XLA reads flags from a file of this name, which may change.
      note_problem("programs are not kept: %s names a file", i ? "LIBTPU_INIT_ARGS" : "XLA_FLAGS");
      return 0;
    }
    // torch_xla may put a blank before its own, or not.
    size_t length = strlen(first);
    while (length && strchr(" \t\n", first[length - 1])) length--;
    add_part(&hash, first, length);
  }
  add_part(&hash, (const char*)version, sizeof version);
  if (!add_topology(&hash, topology)) return 0;
  add_part(&hash, program->format, program->format_size);
  int is_hlo = program->format_size == 3 && !memcmp(program->format, "hlo", 3);
  if (is_hlo) add_message(&hash, program->code, program->code_size, MODULE);
  else add_part(&hash, program->code, program->code_size);
  add_message(&hash, options, options_size, OPTIONS);
  sha256_end(&hash, key);
  return 1;
}

// ---- entries ----------------------------------------------------------------------------------------------------

// A file: this, then the program as the wrapped plugin has serialized it. `folder.py` reads the same.
struct header {
  char magic[8];
  uint8_t key[32];
  uint64_t size;
  uint8_t digest[32];
};

static const char MAGIC[8] = "XLAPROG1";

static void name_of(const uint8_t key[32], char name[65]) {
  for (int i = 0; i < 32; i++) sprintf(name + 2 * i, "%02x", key[i]);
}

static void digest_of(const char* bytes, size_t size, uint8_t digest[32]) {
  struct sha256 hash;
  sha256_begin(&hash);
  sha256_add(&hash, bytes, size);
  sha256_end(&hash, digest);
}

static int read_all(int file, char* to, size_t size) {
  while (size) {
    ssize_t count = read(file, to, size);
    if (count < 0 && errno == EINTR) continue;
    if (count <= 0) return 0;
    to += count;
    size -= count;
  }
  return 1;
}

static int write_all(int file, const char* from, size_t size) {
  while (size) {
    ssize_t count = write(file, from, size);
    if (count < 0 && errno == EINTR) continue;
    if (count <= 0) return 0;
    from += count;
    size -= count;
  }
  return 1;
}

// Nothing that another user may have written is executed.
static int is_ours(const struct stat* status) {
  return (status->st_uid == geteuid() || status->st_uid == 0) && !(status->st_mode & (S_IWGRP | S_IWOTH));
}

// The program in an entry, to be freed; NULL if there is none that can be used.
static char* read_entry(int directory, const char* name, const uint8_t key[32], size_t* size) {
  int file = openat(directory, name, O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK);
  if (file < 0) {
    if (errno != ENOENT) {
      // Of O_NOFOLLOW.
      note_problem("%s is not loaded: %s", name, errno == ELOOP ? "it is a symbolic link" : strerror(errno));
      atomic_fetch_add(&cache_rejected, 1);
    }
    return NULL;
  }
  struct header header;
  struct stat status;
  uint8_t digest[32];
  char* bytes = NULL;
  const char* reason = NULL;
  if (fstat(file, &status) || !S_ISREG(status.st_mode)) reason = "it is not a regular file";
  else if (!is_ours(&status)) reason = "another user may have written it";
  else if (!read_all(file, (char*)&header, sizeof header) || memcmp(header.magic, MAGIC, sizeof MAGIC)) reason = "it is not a compiled program";
  else if (memcmp(header.key, key, 32)) reason = "it holds another program";
  else if (header.size != (uint64_t)status.st_size - sizeof header) reason = "it is cut off";
  else if (!(bytes = malloc(header.size + 1)) || !read_all(file, bytes, header.size)) reason = "it cannot be read";
  else {
    digest_of(bytes, header.size, digest);
    if (memcmp(digest, header.digest, 32)) reason = "it is damaged";
  }
  if (reason) {
    note_problem("%s is not loaded: %s", name, reason);
    atomic_fetch_add(&cache_rejected, 1);
    free(bytes);
    bytes = NULL;
  } else {
    *size = header.size;
    // What was used last is removed last. It may be somebody else's file, whose time we may not set.
    (void)!futimens(file, NULL);
  }
  close(file);
  return bytes;
}

static void write_entry(const char* name, const uint8_t key[32], const char* bytes, size_t size) {
  static atomic_long count;
  struct header header = {.size = size};
  struct timespec now;
  char temporary[128];
  memcpy(header.magic, MAGIC, sizeof MAGIC);
  memcpy(header.key, key, 32);
  digest_of(bytes, size, header.digest);
  // With the time: a killed process may have had the same number.
  clock_gettime(CLOCK_REALTIME, &now);
  snprintf(temporary, sizeof temporary, ".%.16s.%d.%ld.%ld.%ld.tmp", name, getpid(), atomic_fetch_add(&count, 1),
           (long)now.tv_sec, now.tv_nsec);
  int file = openat(folder, temporary, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, 0600);
  int fine = file >= 0 && write_all(file, (const char*)&header, sizeof header) && write_all(file, bytes, size) &&
             !fsync(file);
  int error = errno;
  if (file >= 0 && close(file) && fine) {
    fine = 0;
    error = errno;
  }
  if (fine && renameat(folder, temporary, folder, name)) {
    fine = 0;
    error = errno;
  }
  if (fine) {
    fsync(folder);
    atomic_fetch_add(&cache_written, 1);
    return;
  }
  if (file >= 0) unlinkat(folder, temporary, 0);
  note_problem("compiled programs are not kept: %s", strerror(error));
}

// ---- what is exchanged ------------------------------------------------------------------------------------------

static int load(struct compile_args* args, const char* name, const uint8_t key[32]) {
  struct load_args loading = {.size = sizeof loading, .client = args->client};
  char* bytes = read_entry(folder, name, key, &loading.length);
  if (!bytes) return 0;
  loading.bytes = bytes;
  char what[100];
  snprintf(what, sizeof what, "%s is not loaded", name);
  int fine = went_well(wrapped->functions[EXECUTABLE_DESERIALIZE_AND_LOAD](&loading), what);
  free(bytes);
  if (fine) {
    args->executable = loading.executable;
    atomic_fetch_add(&cache_loaded, 1);
  } else {
    atomic_fetch_add(&cache_rejected, 1);
  }
  return fine;
}

// Destroys the executable.
static void keep(void* executable, const char* name, const uint8_t key[32]) {
  struct serialize_args written = {.size = sizeof written, .executable = executable};
  if (went_well(wrapped->functions[EXECUTABLE_SERIALIZE](&written), "a program is not kept")) {
    write_entry(name, key, written.bytes, written.length);
    if (written.free_owner) written.free_owner(written.owner);
  }
  destroy(EXECUTABLE_DESTROY, executable);
}

static int key_in_process(const struct compile_args* args, uint8_t key[32]) {
  struct topology_args found = {.size = sizeof found, .client = args->client};
  return went_well(wrapped->functions[CLIENT_TOPOLOGY](&found), "programs are not kept") &&
         key_of(args->program, args->options, args->options_size, found.topology, key);
}

static Error compile(void* arguments) {
  struct compile_args* args = arguments;
  uint8_t key[32];
  char name[65];
  int has_key = folder >= 0 && identity && key_in_process(args, key);
  char* logged = &cache_log[atomic_fetch_add(&cache_asked, 1) % LOGGED];
  *logged = 0;
  if (has_key) {
    name_of(key, name);
    if (load(args, name, key)) {
      *logged = 1;
      return NULL;
    }
  }
  Error error = wrapped->functions[CLIENT_COMPILE](args);
  if (error) return error;
  atomic_fetch_add(&cache_compiled, 1);
  // What was wrong with an entry says more.
  if (has_key && !writes && !*cache_problem) note_problem("what is compiled is not kept: the folder can only be read");
  if (!has_key || !writes) return NULL;
  struct get_executable_args got = {.size = sizeof got, .loaded = args->executable};
  if (went_well(wrapped->functions[LOADED_EXECUTABLE_GET_EXECUTABLE](&got), "a program is not kept"))
    keep(got.executable, name, key);
  return NULL;
}

static Error execute(void* arguments) {
  struct execute_args* args = arguments;
  size_t longer[32] = {0}, *callers = args->options;
  memcpy(longer, callers, *callers < sizeof longer ? *callers : sizeof longer);
  longer[0] = sizeof longer;
  args->options = longer;
  Error error = wrapped->functions[LOADED_EXECUTABLE_EXECUTE](args);
  args->options = callers;
  return error;
}

// ---- compiling ahead --------------------------------------------------------------------------------------------
//
// In a process on the CPU, whose devices stand in for TPUs, each program that is to be compiled is recorded. Further
// processes, with libtpu as the wrapped plugin, compile what was recorded for TPUs that are not there.

// A recorded program is the program of an entry, under its own checksum: these sizes, then the three parts.
struct request {
  uint64_t format_size, options_size, code_size;
};

static Error record(void* arguments) {
  struct compile_args* args = arguments;
  const struct program* program = args->program;
  struct request sizes = {program->format_size, args->options_size, program->code_size};
  size_t size = sizeof sizes + sizes.format_size + sizes.options_size + sizes.code_size;
  char *bytes = malloc(size), *to = bytes;
  if (bytes) {
    uint8_t key[32];
    char name[65];
    to = mempcpy(to, &sizes, sizeof sizes);
    to = mempcpy(to, program->format, sizes.format_size);
    to = mempcpy(to, args->options, sizes.options_size);
    memcpy(to, program->code, sizes.code_size);
    digest_of(bytes, size, key);
    name_of(key, name);
    write_entry(name, key, bytes, size);
    free(bytes);
  } else {
    note_problem("a program is not recorded: no memory");
  }
  return wrapped->functions[CLIENT_COMPILE](args);
}

static Error create_stand_in(void* arguments) {
  struct create_client_args* args = arguments;
  static const char name[] = "cpu_device_count";
  // In place of the options of libtpu.
  const struct option count = {sizeof count, NULL, name, sizeof name - 1, NUMBER, {.number = stand_ins}, 1};
  args->options = &count;
  args->option_count = 1;
  return wrapped->functions[CLIENT_CREATE](args);
}

// torch_xla lowers for the platform of this name.
static Error stand_in_name(void* arguments) {
  struct text_args* args = arguments;
  args->text = "tpu";
  args->length = 3;
  return NULL;
}

// The devices of a slice of TPUs that is not there: "v5e:2x4"; NULL if there is no such slice.
//   chips: of a host, along three dimensions.
//   config: libtpu's name for how chips are divided into devices; NULL for the usual one.
static void* create_topology(const char* slice, const int64_t chips[3], const char* config) {
  static const char bounds[] = "chips_per_host_bounds", form[] = "chip_config_name";
  const struct option options[2] = {
      {sizeof *options, NULL, bounds, sizeof bounds - 1, NUMBERS, {.pointer = chips}, 3},
      {sizeof *options, NULL, form, sizeof form - 1, TEXT, {.pointer = config}, config ? strlen(config) : 0},
  };
  struct initialize_args initializing = {.size = sizeof initializing};
  struct create_topology_args args = {.size = sizeof args, .name = slice, .name_size = strlen(slice)};
  args.options = options;
  args.option_count = config ? 2 : 1;
  if (!went_well(wrapped->functions[PLUGIN_INITIALIZE](&initializing), "the compiler does not start")) return NULL;
  return went_well(wrapped->functions[TOPOLOGY_CREATE](&args), slice) ? args.topology : NULL;
}

// ---- what Python and torch_xla call -----------------------------------------------------------------------------

// Says which plugin is wrapped, before torch_xla loads this library.
//   described: what else a compiled program depends on: the plugin's build, the host's processor.
//   pads: whether the plugin is newer than torch_xla and wants longer options of executions.
void cache_wrap(const char* path, const char* described, int pads) {
  plugin_path = strdup(path);
  identity = strdup(described);
  pads_options = pads;
}

// Says where entries are from now on: a descriptor of the folder, which Python has checked, or -1 for nowhere.
void cache_use(int directory, int writable) {
  // The one before stays open: another thread may be writing to it.
  writes = writable;
  folder = directory;
}

// From now on this process records the programs that are to be compiled, in the folder of `cache_use`, and its devices
// are taken for TPUs. To be called before torch_xla loads this library; the wrapped plugin is one for the CPU.
void cache_record(long devices) { stand_ins = devices; }

const void* GetPjrtApi(void) {
  if (ours) return ours;
  // In a process that another one started, which has not called `cache_wrap`: only passes calls on.
  static int entered;
  if (entered++) return NULL;
  if (!plugin_path) plugin_path = getenv("XLA_ADAPTERS_WRAPPED_PLUGIN");
  void* library = plugin_path ? dlopen(plugin_path, RTLD_NOW | RTLD_LOCAL) : NULL;
  const void* (*get)(void) = library ? (const void* (*)(void))dlsym(library, "GetPjrtApi") : NULL;
  if (!get || !(wrapped = get())) {
    const char* said = plugin_path ? dlerror() : "cache_wrap was not called";
    fprintf(stderr, "xla_adapters: %s\n", said ? said : "the wrapped plugin gives no table of functions");
    return NULL;
  }
  ours = malloc(wrapped->size);
  if (!ours) abort();
  memcpy(ours, wrapped, wrapped->size);
  size_t known = (wrapped->size - sizeof *wrapped) / sizeof *wrapped->functions;
  // XLA reads them once, at its first use.
  cache_flags[0] = strdup(getenv("XLA_FLAGS") ? getenv("XLA_FLAGS") : "");
  cache_flags[1] = strdup(getenv("LIBTPU_INIT_ARGS") ? getenv("LIBTPU_INIT_ARGS") : "");
  // With another major version, or without a function that is needed, nothing is replaced.
  int works = !wrapped->major && known > CLIENT_TOPOLOGY;
  static const int needed[] = {CLIENT_TOPOLOGY, EXECUTABLE_SERIALIZE, EXECUTABLE_DESERIALIZE_AND_LOAD};
  for (int i = 0; works && i < 3; i++) works = wrapped->functions[needed[i]] != NULL;
  if (works) ours->functions[CLIENT_COMPILE] = compile;
  else note_problem("programs are not kept: the device's plugin lacks a function that this needs");
  if (!wrapped->major && pads_options && known > LOADED_EXECUTABLE_EXECUTE) ours->functions[LOADED_EXECUTABLE_EXECUTE] = execute;
  if (works && stand_ins) {
    // Not `compile`: what is recorded is never loaded.
    ours->functions[CLIENT_COMPILE] = record;
    ours->functions[CLIENT_CREATE] = create_stand_in;
    ours->functions[CLIENT_PLATFORM_NAME] = stand_in_name;
  }
  return ours;
}

// Compiles a recorded program for a slice, and writes the entry that a run on it looks for.
//   recorded, key: the folder, and the name as 32 bytes.
//   slice, chips, config: see `create_topology`.
// Returns 1 if it is there now, and 0 if not; then `cache_problem` says why.
int cache_compile_ahead(int recorded, const uint8_t key[32], const char* slice, const int64_t chips[3],
                        const char* config) {
  char name[65];
  size_t size = 0;
  if (!GetPjrtApi() || ours->functions[CLIENT_COMPILE] != compile || !wrapped->functions[TOPOLOGY_CREATE] ||
      !wrapped->functions[COMPILE_AHEAD]) {
    note_problem("the compiler's library cannot be loaded, or does not compile ahead");
    return 0;
  }
  name_of(key, name);
  char* bytes = read_entry(recorded, name, key, &size);
  void* topology = bytes ? create_topology(slice, chips, config) : NULL;
  if (!topology) return 0;
  struct request sizes;
  memcpy(&sizes, bytes, sizeof sizes);
  const char *format = bytes + sizeof sizes, *options = format + sizes.format_size;
  const char* code = options + sizes.options_size;
  struct program program = {sizeof program, NULL, code, sizes.code_size, format, sizes.format_size};
  uint8_t made[32];
  if (!key_of(&program, options, sizes.options_size, topology, made)) return 0;
  name_of(made, name);
  struct compile_ahead_args args = {.size = sizeof args, .topology = topology, .program = &program};
  args.options = options;
  args.options_size = sizes.options_size;
  if (!went_well(wrapped->functions[COMPILE_AHEAD](&args), "it does not compile")) return 0;
  keep(args.executable, name, made);
  return atomic_load(&cache_written) > 0;
}
