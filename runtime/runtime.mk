# Native runtime: quick in-place build (`make runtime`) and the sanitizer runs (`make asan`, `make tsan`).
# The wheel is built by scikit-build-core from the same CMakeLists.txt.
RUNTIME_PYTHON ?= $(firstword $(wildcard $(VIRTUAL_ENV)/bin/python) $(wildcard $(BIN)/python) $(PYTHON))
RUNTIME_BUILD  := build/runtime
# What the sanitizers run over: threads, memory, operators.
STRESS_SOURCES := $(addprefix runtime/src/,arena.cpp cpu.cpp direct_read.cpp huge_buffer.cpp job.cpp kernel_lib.cpp linear.cpp \
  moe.cpp moe_call.cpp moe_experts.cpp moe_tasks.cpp pack.cpp pool.cpp pool_work.cpp quantize.cpp quantize_codebook.cpp)

.PHONY: runtime asan tsan

runtime:
	cmake -S . -B $(RUNTIME_BUILD) -DPython_EXECUTABLE=$(RUNTIME_PYTHON) -DCMAKE_BUILD_TYPE=Release > /dev/null
	cmake --build $(RUNTIME_BUILD) --parallel $(or $(JOBS),2)
	@for lib in $(RUNTIME_BUILD)/_runtime*.so; do \
	  cp $$lib ktc/.$$(basename $$lib).new && mv -f ktc/.$$(basename $$lib).new ktc/$$(basename $$lib); done

asan: build/stress-asan build/lane_stress-asan
	for run in $^; do ASAN_OPTIONS=detect_leaks=1 UBSAN_OPTIONS=halt_on_error=1 $$run $(STRESS_ARGS) || exit 1; done

tsan: build/stress-tsan build/lane_stress-tsan
	for run in $^; do TSAN_OPTIONS=halt_on_error=1 $$run $(STRESS_ARGS) || exit 1; done

build/%-asan: SANITIZE := address,undefined
build/%-tsan: SANITIZE := thread
build/stress-%: runtime/tests/stress.cpp tests/runtime/reference_lib.cpp $(STRESS_SOURCES) $(wildcard runtime/src/*.h)
	mkdir -p build
	$(CXX) -std=c++17 -O2 -g -fPIC -shared -fsanitize=$(SANITIZE) -Iruntime/include \
	  tests/runtime/reference_lib.cpp -o $@.lib.so
	$(CXX) -std=c++17 -O1 -g -Wall -Wextra -fsanitize=$(SANITIZE) -Iruntime/include -Iruntime/src \
	  runtime/tests/stress.cpp $(STRESS_SOURCES) -o $@ -pthread -ldl

# The CUDA lane's callback protocol, a thread as the stream.
build/lane_stress-%: runtime/tests/lane_stress.cpp runtime/tests/thread_stream.h tests/runtime/reference_lib.cpp \
  $(STRESS_SOURCES) runtime/src/cuda/exchange.cpp runtime/src/cuda/lane.cpp $(wildcard runtime/src/*.h runtime/src/cuda/*.h)
	mkdir -p build
	$(CXX) -std=c++17 -O2 -g -fPIC -shared -fsanitize=$(SANITIZE) -Iruntime/include \
	  tests/runtime/reference_lib.cpp -o $@.lib.so
	$(CXX) -std=c++17 -O1 -g -Wall -Wextra -fsanitize=$(SANITIZE) -Iruntime/include -Iruntime/src \
	  $< $(STRESS_SOURCES) runtime/src/cuda/exchange.cpp runtime/src/cuda/lane.cpp -o $@ -pthread -ldl
