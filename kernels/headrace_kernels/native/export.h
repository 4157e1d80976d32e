#ifndef HEADRACE_EXPORT_H
#define HEADRACE_EXPORT_H

// Functions found by name from Python. They take plain pointers and sizes, allocate nothing that outlives them, and
// never throw: arguments are checked on the other side.
#define HR_EXPORT extern "C" __attribute__((visibility("default")))

#endif
