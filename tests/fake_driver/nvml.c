/* A stand-in for libnvidia-ml.so.1 with the functions that inferpool and torch call. It follows the
   NVML API reference (docs.nvidia.com/deploy/nvml-api). A handle is the address of a UUID. */
#include "described.h"

enum { OK, UNINITIALIZED, INVALID_ARGUMENT, NOT_SUPPORTED, NO_PERMISSION, NOT_FOUND = 6,
       INSUFFICIENT_SIZE, TIMEOUT = 10, LIBRARY_MISMATCH = 18, UNKNOWN = 999 };
#define API __attribute__((visibility("default"))) int
#define BEGIN(who) \
    int failed = begin(__func__, who); \
    if (failed) return failed
#define BEGIN_WHOLE(who) \
    BEGIN(who); \
    if (is_slice(who)) return NOT_SUPPORTED

struct PciInfo { char legacy_bus_id[16]; unsigned numbers[5]; char bus_id[32]; };

static int num_open;
static char known[MOST][96];
static struct { const char *listens[MOST]; int num, seen[MOST]; } events;

static int begin(const char *function, const char *who) {
    int failed = called(function, who);
    return num_open ? failed : UNINITIALIZED;
}

static int is_slice(const char *who) {
    char whole[128];
    return look_up(who, "slice_of", whole);
}

static int is_cut(const char *who) {
    char slices[MOST][96];
    return number_of(who, "mig", 0) || find_devices(who, slices) > 0;
}

/* Answer with a handle that stays the same for as long as the process lives. */
static const char *handle_of(const char *uuid) {
    for (int i = 0; i < MOST; i++) {
        if (!known[i][0]) strcpy(known[i], uuid);
        if (!strcmp(known[i], uuid)) return known[i];
    }
    abort();
}

static int copy(const char *text, char *to, unsigned size) {
    if (strlen(text) >= size) return INSUFFICIENT_SIZE;
    strcpy(to, text);
    return OK;
}

API nvmlInitWithFlags(unsigned flags) {
    int failed = called(__func__, "driver");
    num_open += !failed;
    return failed;
}
API nvmlInit_v2(void) { return nvmlInitWithFlags(0); }
API nvmlInit(void) { return nvmlInitWithFlags(0); }

API nvmlShutdown(void) {
    BEGIN("driver");
    num_open--;
    return OK;
}

__attribute__((visibility("default"))) const char *nvmlErrorString(int error) {
    switch (error) {
    case NOT_SUPPORTED: return "Not Supported";
    case NO_PERMISSION: return "Insufficient Permissions";
    case NOT_FOUND: return "Not Found";
    case TIMEOUT: return "Timeout";
    case LIBRARY_MISMATCH: return "Driver/library version mismatch";
    default: return "Unknown Error";
    }
}

API nvmlSystemGetDriverVersion(char *version, unsigned size) {
    char text[128];
    BEGIN("driver");
    return look_up("driver", "version", text) ? copy(text, version, size) : UNKNOWN;
}

API nvmlSystemGetCudaDriverVersion_v2(int *version) {
    BEGIN("driver");
    *version = (int)number_of("driver", "cuda", 13000);
    return OK;
}

API nvmlDeviceGetCount_v2(unsigned *count) {
    char uuids[MOST][96];
    BEGIN("driver");
    *count = find_devices("", uuids);
    return OK;
}

API nvmlDeviceGetHandleByIndex_v2(unsigned index, const char **device) {
    char uuids[MOST][96];
    if (index >= (unsigned)find_devices("", uuids)) return INVALID_ARGUMENT;
    BEGIN(uuids[index]);
    *device = handle_of(uuids[index]);
    return OK;
}

API nvmlDeviceGetHandleByUUID(const char *uuid, const char **device) {
    char name[128];
    BEGIN(uuid);
    if (!look_up(uuid, "name", name)) return NOT_FOUND;
    *device = handle_of(uuid);
    return OK;
}

API nvmlDeviceGetUUID(const char *device, char *uuid, unsigned size) {
    BEGIN(device);
    return copy(device, uuid, size);
}

API nvmlDeviceGetName(const char *device, char *name, unsigned size) {
    char text[128];
    BEGIN(device);
    return look_up(device, "name", text) ? copy(text, name, size) : UNKNOWN;
}

API nvmlDeviceGetMemoryInfo(const char *device, unsigned long long memory[3]) {
    BEGIN(device);
    memory[0] = number_of(device, "memory", 0);
    memory[2] = number_of(device, "used", 0);
    memory[1] = memory[0] - memory[2];
    return OK;
}

API nvmlDeviceGetMigMode(const char *device, unsigned *now, unsigned *later) {
    BEGIN_WHOLE(device);
    if (number_of(device, "mig", -1) < 0 && !is_cut(device)) return NOT_SUPPORTED;
    *now = *later = is_cut(device);
    return OK;
}

API nvmlDeviceGetMaxMigDeviceCount(const char *device, unsigned *count) {
    BEGIN_WHOLE(device);
    *count = is_cut(device) ? 7 : 0;
    return OK;
}

/* Numbers of slices may have gaps: here, the second slice leaves one behind it. */
API nvmlDeviceGetMigDeviceHandleByIndex(const char *device, unsigned index, const char **slice) {
    char slices[MOST][96];
    unsigned place = index > 2 ? index - 1 : index;
    BEGIN_WHOLE(device);
    if (index == 2 || place >= (unsigned)find_devices(device, slices)) return NOT_FOUND;
    *slice = handle_of(slices[place]);
    return OK;
}

API nvmlDeviceGetCpuAffinity(const char *device, unsigned words, unsigned long *masks) {
    BEGIN_WHOLE(device);
    memset(masks, 0, words * sizeof *masks);
    masks[0] = number_of(device, "cpus", 0);
    return OK;
}

/* The `bus_id` of a GPU is what NVML writes, such as 00000000:3B:00.0. */
API nvmlDeviceGetPciInfo_v3(const char *device, struct PciInfo *info) {
    char text[128];
    BEGIN_WHOLE(device);
    if (!look_up(device, "bus_id", text)) return NOT_SUPPORTED;
    return copy(text, info->bus_id, sizeof info->bus_id);
}

API nvmlDeviceGetP2PStatus(const char *one, const char *other, int what, int *status) {
    char text[128];
    BEGIN_WHOLE(one);
    look_up(one, "nvlink", text);
    *status = text[0] && !strcmp(text, other) ? 0 : 5; /* 5: not supported */
    return OK;
}

API nvmlDeviceGetTopologyCommonAncestor(const char *one, const char *other, int *level) {
    BEGIN_WHOLE(one);
    *level = number_of(one, "socket", 0) == number_of(other, "socket", 0) ? 30 : 50;
    return OK;
}

API nvmlDeviceGetCudaComputeCapability(const char *device, int *major, int *minor) {
    BEGIN(device);
    *major = (int)number_of(device, "capability", 90) / 10;
    *minor = (int)number_of(device, "capability", 90) % 10;
    return OK;
}

#define NUMBER(function, key)                                                                     \
    API function(const char *device, unsigned *value) {                                           \
        BEGIN_WHOLE(device);                                                                      \
        if (number_of(device, key, -1) < 0) return NOT_SUPPORTED;                                 \
        *value = (unsigned)number_of(device, key, 0);                                             \
        return OK;                                                                                \
    }
NUMBER(nvmlDeviceGetComputeMode, "compute_mode")
NUMBER(nvmlDeviceGetPersistenceMode, "persistence")
NUMBER(nvmlDeviceGetPowerUsage, "power_mw")

API nvmlDeviceGetTemperature(const char *device, int sensor, unsigned *celsius) {
    BEGIN_WHOLE(device);
    *celsius = (unsigned)number_of(device, "temperature", 40);
    return OK;
}

API nvmlDeviceGetUtilizationRates(const char *device, unsigned rates[2]) {
    BEGIN_WHOLE(device);
    if (is_cut(device)) return NOT_SUPPORTED;
    rates[0] = (unsigned)number_of(device, "utilization", 0);
    rates[1] = 0;
    return OK;
}

/* The state is the eighth number of nvmlGpuFabricInfo_v2_t: 3 once the fabric is up. */
API nvmlDeviceGetGpuFabricInfoV(const char *device, unsigned *info) {
    BEGIN_WHOLE(device);
    if (number_of(device, "fabric", 0) == 0) return NOT_SUPPORTED;
    info[7] = (unsigned)number_of(device, "fabric", 0);
    return OK;
}

API nvmlDeviceGetTotalEccErrors(const char *device, int type, int counter,
                                unsigned long long *count) {
    BEGIN_WHOLE(device);
    if (number_of(device, "ecc_errors", -1) < 0) return NOT_SUPPORTED;
    *count = number_of(device, "ecc_errors", 0);
    return OK;
}

typedef struct { unsigned pid; unsigned long long bytes; unsigned instances[2]; } Process;

API nvmlDeviceGetComputeRunningProcesses_v3(const char *device, unsigned *count, Process *found) {
    unsigned pid = (unsigned)number_of(device, "process", 0);
    unsigned room = *count;
    BEGIN(device);
    *count = pid != 0;
    if (room < *count) return INSUFFICIENT_SIZE;
    if (pid) found[0] = (Process){pid, ~0ULL, {~0U, ~0U}};
    return OK;
}

API nvmlEventSetCreate(void **set) {
    BEGIN("driver");
    *set = &events;
    return OK;
}

API nvmlDeviceRegisterEvents(const char *device, unsigned long long types, void *set) {
    BEGIN_WHOLE(device);
    events.listens[events.num++] = device;
    return OK;
}

typedef struct { const char *device; unsigned long long type, data; unsigned instances[2]; } Event;

/* Tell each Xid error once: those that come later in the description are later ones. */
API nvmlEventSetWait_v2(void *set, Event *event, unsigned timeout_ms) {
    BEGIN("driver");
    for (int i = 0; i < events.num; i++) {
        Line line;
        int number = 0, found = 0;
        FILE *file = description();
        while (!found && next_line(file, &line))
            found = !strcmp(line.who, events.listens[i]) && !strcmp(line.key, "xid") &&
                    number++ == events.seen[i];
        if (file) fclose(file);
        if (!found) continue;
        events.seen[i]++;
        *event = (Event){events.listens[i], 8, atoll(line.value), {~0U, ~0U}};
        return OK;
    }
    return TIMEOUT;
}
