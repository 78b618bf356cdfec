/* What both stand-ins know: a text file describes the machine, another takes down the calls.

   Each line of the file $FAKE_DRIVER is `WHO KEY VALUE`. WHO is the UUID of a GPU or of a MIG slice,
   or `driver`. GPUs come in the order of NVML, which is that of the PCI bus; `name` must be the
   first key of each. Where KEY is the name of a function, this function fails for this WHO, and
   VALUE is the number of the error. WHO hangs in the function that its key `hangs` names. The file
   is read again at every question, so a test may change it while a process runs. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <fcntl.h>
#include <unistd.h>

#define MOST 64 /* devices */
typedef struct { char who[96], key[64], value[128]; } Line;

/* Read the next line of the description; a file that is not there has none. */
static int next_line(FILE *file, Line *line) {
    return file && fscanf(file, "%95s %63s %127[^\n]", line->who, line->key, line->value) == 3;
}

static FILE *description(void) {
    const char *path = getenv("FAKE_DRIVER");
    return path ? fopen(path, "re") : NULL;
}

/* Copy the value that `who` has for `key`. Answers 0 if there is none, and `value` is empty then. */
static int look_up(const char *who, const char *key, char value[128]) {
    Line line;
    int found = 0;
    FILE *file = description();
    value[0] = 0;
    while (!found && next_line(file, &line))
        if (!strcmp(line.who, who) && !strcmp(line.key, key)) {
            strcpy(value, line.value);
            found = 1;
        }
    if (file) fclose(file);
    return found;
}

static long long number_of(const char *who, const char *key, long long otherwise) {
    char value[128];
    return look_up(who, key, value) ? atoll(value) : otherwise;
}

/* Copy the UUIDs of the GPUs, or of the slices of one, in the order of the PCI bus. */
static int find_devices(const char *whole, char uuids[MOST][96]) {
    Line line;
    int count = 0;
    FILE *file = description();
    while (count < MOST && next_line(file, &line)) {
        char parent[128];
        if (strcmp(line.key, "name") || !strcmp(line.who, "driver")) continue;
        look_up(line.who, "slice_of", parent);
        if (!strcmp(parent, whole)) strcpy(uuids[count++], line.who);
    }
    if (file) fclose(file);
    return count;
}

/* Take down a call, with the process and what it has been told about GPUs. */
static void note(const char *function, const char *who) {
    const char *path = getenv("FAKE_DRIVER_LOG"), *visible = getenv("CUDA_VISIBLE_DEVICES"),
               *order = getenv("CUDA_DEVICE_ORDER");
    char text[1024];
    int log = path ? open(path, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0644) : -1;
    int size = snprintf(text, sizeof text, "%d\t%s\t%s\t%s\t%s\n", getpid(), function, who,
                        visible ? visible : "-", order ? order : "-");
    if (log < 0) return;
    if (write(log, text, size) != size) abort();
    close(log);
}

/* Take down a call, and answer with the error that the description has for it, or 0. */
static int called(const char *function, const char *who) {
    char hangs[128];
    note(function, who);
    if (look_up(who, "hangs", hangs) && !strcmp(hangs, function))
        for (;;) pause();
    return (int)number_of(who, function, 0);
}
