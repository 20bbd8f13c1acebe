// Native operators for baseline; the code is unit.inc, the -m flags are CMake's.
#define KTC_OPS_TABLE kTable_baseline
#define KTC_OPS_NAME "baseline"
#include "ops/unit.inc"
