// Native operators for avx512; the code is unit.inc, the -m flags are CMake's.
#define KTC_OPS_TABLE kTable_avx512
#define KTC_OPS_NAME "avx512"
#include "ops/unit.inc"
