// The least a test program needs: named checks that abort with file and line.

#pragma once

#include <cstdio>
#include <cstdlib>

#define CHECK(condition) \
  do { \
    if (!(condition)) { \
      std::fprintf(stderr, "%s:%d: %s is false\n", __FILE__, __LINE__, #condition); \
      std::abort(); \
    } \
  } while (false)
