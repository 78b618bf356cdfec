/* A stand-in for libcuda.so.1: enough for CUDA's runtime to load it and to be told by `cuInit` that
   there is no device, and to ask it which devices a process would see, and in which order. */
#include "described.h"
#include <dlfcn.h>

enum { OK, INVALID_VALUE, NOT_INITIALIZED = 3, NO_DEVICE = 100, INVALID_DEVICE, NOT_FOUND = 500 };
#define API __attribute__((visibility("default"))) int

static char visible[MOST][96];
static int num_visible = -1;

/* Put the fastest GPU first, as CUDA does unless it is told the order of the PCI bus. */
static int by_speed(const void *one, const void *other) {
    return (int)(number_of(other, "speed", 0) - number_of(one, "speed", 0));
}

/* Find the device that one part of CUDA_VISIBLE_DEVICES names; -1 if there is none. */
static int named(const char *part, char all[MOST][96], int count) {
    int found = -1;
    char *end;
    long index = strtol(part, &end, 10);
    if (end != part) return index >= 0 && index < count ? (int)index : -1;
    for (int i = 0; i < count && *part; i++)
        if (!strncmp(all[i], part, strlen(part))) {
            if (found >= 0) return -1; /* names several */
            found = i;
        }
    return found;
}

/* A process sees whole GPUs, or else one slice: that which it names first, or the first of all. */
static void find_visible(void) {
    char gpus[MOST][96], all[MOST][96], parts[1024], *rest, *order = getenv("CUDA_DEVICE_ORDER");
    int num_gpus = find_devices("", gpus), count = 0;
    if (!order || strcmp(order, "PCI_BUS_ID")) {
        for (int i = 1; i < num_gpus; i++) /* qsort would not keep the order of equal ones */
            for (int j = i; j > 0 && by_speed(gpus[j - 1], gpus[j]) > 0; j--) {
                char swapped[96];
                strcpy(swapped, gpus[j]);
                strcpy(gpus[j], gpus[j - 1]);
                strcpy(gpus[j - 1], swapped);
            }
    }
    for (int i = 0; i < num_gpus; i++) {
        char slices[MOST][96];
        int num_slices = find_devices(gpus[i], slices);
        for (int j = 0; j < num_slices; j++) strcpy(all[count++], slices[j]);
        if (!num_slices && !number_of(gpus[i], "mig", 0)) strcpy(all[count++], gpus[i]);
    }
    num_visible = 0;
    if (!getenv("CUDA_VISIBLE_DEVICES")) {
        for (int i = 0; i < count; i++) strcpy(visible[num_visible++], all[i]);
    } else {
        snprintf(parts, sizeof parts, "%s", getenv("CUDA_VISIBLE_DEVICES"));
        for (char *part = strtok_r(parts, ",", &rest); part; part = strtok_r(NULL, ",", &rest)) {
            int i = named(part, all, count);
            if (i < 0) break;
            strcpy(visible[num_visible++], all[i]);
        }
    }
    for (int i = 0; i < num_visible; i++)
        if (!strncmp(visible[i], "MIG-", 4)) {
            if (i) strcpy(visible[0], visible[i]);
            num_visible = 1;
        }
}

API cuInit(unsigned flags) {
    int failed = called(__func__, "driver");
    if (failed) return failed;
    find_visible();
    return num_visible ? OK : NO_DEVICE;
}

API cuDriverGetVersion(int *version) {
    note(__func__, "driver");
    *version = (int)number_of("driver", "cuda", 13000);
    return OK;
}

API cuDeviceGetCount(int *count) {
    *count = num_visible;
    return num_visible < 0 ? NOT_INITIALIZED : OK;
}

API cuDeviceGetUuid_v2(char uuid[96], int device) {
    if (device < 0 || device >= num_visible) return INVALID_DEVICE;
    strcpy(uuid, visible[device]);
    return OK;
}

static int refuse(void) { return NOT_FOUND; }

API cuGetExportTable(const void **table, const void *id) { return NOT_FOUND; }

API cuGetProcAddress_v2(const char *name, void **function, int version, unsigned long long flags,
                        int *status) {
    Dl_info self;
    char newer[128];
    void *library = dladdr((void *)refuse, &self) ? dlopen(self.dli_fname, RTLD_LAZY) : NULL;
    snprintf(newer, sizeof newer, "%s_v2", name);
    *function = dlsym(library, newer);
    if (!*function) *function = dlsym(library, name);
    if (!*function) *function = (void *)refuse;
    if (status) *status = 0;
    return OK;
}
