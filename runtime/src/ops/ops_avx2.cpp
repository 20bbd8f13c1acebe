// Native operators for avx2; the code is unit.inc, the -m flags are CMake's.
#define KTC_OPS_TABLE kTable_avx2
#define KTC_OPS_NAME "avx2"
#include "ops/unit.inc"
