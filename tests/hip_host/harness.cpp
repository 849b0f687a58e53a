// Runs one launch of a kernel on the CPU with the semantics of a GPU, and reports what a GPU would not.
//
//   stdin   int32 programs, threads, bytes of shared memory, schedule; the Call; for each of 18 pointers int64 size (-1: null),
//           offset of its address from a multiple of 16, writable (0 or 1), and the bytes
//   stdout  the bytes of every writable pointer
//   stderr  what is wrong; the exit status is then not 0
//
// Schedule 0 runs waves and lanes in order, 1 in reverse, any other in an order drawn from it. Between two synchronisation
// points the lanes of a wave run one after another, so that whatever a kernel expects of their interplay without a barrier
// or an exchange goes wrong in some schedule.
//
// This file is compiled without sanitizers and serves kernels compiled in two ways: with AddressSanitizer, told about fibers
// and about the space around each buffer; or with the instrumentation of ThreadSanitizer, whose calls (not its library)
// end here and make every access to a buffer known: bounds are then checked to the byte, as are races.
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <ucontext.h>
#include <unistd.h>

#include <algorithm>
#include <random>
#include <vector>

#define PF_MATRIX -1
#define PF_MATRIX_MFMA 1
#define PF_MATRIX_WMMA11 2
#define PF_MATRIX_WMMA12 3
#define PF_WAVE 64
#include "platform.h"

// The kernel, from kernel.cpp.
extern const char* const simt_name;
extern const int simt_threads, simt_wave, simt_call_bytes;
extern const bool simt_flushes;  // 16-bit operands of matrix instructions that are subnormal count as 0
void simt_kernel(void* const* pointers, const void* call);

// AddressSanitizer, where the kernel was compiled with it.
extern "C" {
__attribute__((weak)) void __sanitizer_start_switch_fiber(void** fake_stack, const void* bottom, size_t size);
__attribute__((weak)) void __sanitizer_finish_switch_fiber(void* fake_stack, const void** bottom, size_t* size);
__attribute__((weak)) void __asan_poison_memory_region(const volatile void* address, size_t size);
}

namespace {
constexpr int POINTERS = 18;
constexpr size_t STACK = 256 << 10, GAP = 64 << 10, PAGE = 4096;
const char* const NAMES[POINTERS + 1] = {
    "query", "key", "value", "out", "lse", "grad_out", "grad_lse", "delta", "dquery", "dkey", "dvalue", "dbias", "bias", "mask",
    "alibi_slopes", "sinks", "cu_seqlens_q", "cu_seqlens_k", "shared memory"};

int programs, threads, shared_bytes, schedule, program;
std::mt19937 random_bits;
void* pointers[POINTERS];
std::vector<char> call;

// ---------------------------------------------------------------- work-items
enum State { RUNNING, MEETING, BARRIER, DONE };
const char* const STATES[] = {"", "", "barrier", "end of the kernel"};

struct WorkItem {
    intptr_t context[5];  // of __builtin_setjmp
    bool started;
    char* stack;
    void* fake_stack;
    State state;
    const char* what;
    int line;
    simt::Operation operation;
    void* brought;
};
std::vector<WorkItem> items;
int current = -1;            // work-item that runs
std::vector<unsigned> steps; // meetings of each wave so far
intptr_t scheduler[5];
const void* main_stack;
size_t main_stack_size;
}  // namespace

[[noreturn]] void simt::fail(const char* format, ...) {
    fprintf(stderr, "%s, workgroup %d", simt_name, program);
    if (current >= 0) fprintf(stderr, ", work-item %d (wave %d, lane %d)", current, current / simt_wave, current % simt_wave);
    fprintf(stderr, ": ");
    va_list arguments;
    va_start(arguments, format);
    vfprintf(stderr, format, arguments);
    fprintf(stderr, "\n");
    _exit(2);
}

namespace {
using simt::fail;

[[noreturn]] __attribute__((noinline)) void jump(intptr_t* context) { __builtin_longjmp(reinterpret_cast<void**>(context), 1); }

__attribute__((noinline)) void pause_as(State state) {
    WorkItem& item = items[current];
    item.state = state;
    if (__sanitizer_start_switch_fiber) __sanitizer_start_switch_fiber(&item.fake_stack, main_stack, main_stack_size);
    if (!__builtin_setjmp(reinterpret_cast<void**>(item.context))) jump(scheduler);
    if (__sanitizer_finish_switch_fiber) __sanitizer_finish_switch_fiber(items[current].fake_stack, nullptr, nullptr);
}

void work() {
    if (__sanitizer_finish_switch_fiber) __sanitizer_finish_switch_fiber(nullptr, &main_stack, &main_stack_size);
    for (;;) {
        simt_kernel(pointers, call.data());
        items[current].what = "";
        pause_as(DONE);
    }
}

__attribute__((noinline)) void resume(int index) {
    WorkItem& item = items[current = index];
    void* fake_stack = nullptr;
    item.state = RUNNING;
    if (__sanitizer_start_switch_fiber) __sanitizer_start_switch_fiber(&fake_stack, item.stack, STACK);
    if (!__builtin_setjmp(reinterpret_cast<void**>(scheduler))) {
        if (item.started) jump(item.context);
        item.started = true;
        ucontext_t entry;
        getcontext(&entry);
        entry.uc_stack.ss_sp = item.stack;
        entry.uc_stack.ss_size = STACK;
        makecontext(&entry, work, 0);
        setcontext(&entry);
    }
    if (__sanitizer_finish_switch_fiber) __sanitizer_finish_switch_fiber(fake_stack, nullptr, nullptr);
    current = -1;
}

std::vector<int> ordered(int first, int count) {
    std::vector<int> order(count);
    for (int i = 0; i < count; ++i) order[i] = first + (schedule == 1 ? count - 1 - i : i);
    if (schedule > 1) std::shuffle(order.begin(), order.end(), random_bits);
    return order;
}

void require_same(int first, int other) {
    const WorkItem &a = items[first], &b = items[other];
    if (a.state == b.state && (a.state == DONE || (a.what == b.what && a.line == b.line))) return;
    fail("work-items %d and %d (wave %d lane %d, wave %d lane %d) part: %s %s at line %d, %s %s at line %d", first, other,
         first / simt_wave, first % simt_wave, other / simt_wave, other % simt_wave, STATES[a.state], a.what, a.line,
         STATES[b.state], b.what, b.line);
}

// All lanes of a wave run to where they meet, and meet.
State advance(int wave) {
    const int first = wave * simt_wave;
    for (int item : ordered(first, simt_wave)) resume(item);
    for (int i = 1; i < simt_wave; ++i) require_same(first, first + i);
    if (items[first].state == MEETING) {
        std::vector<void*> lanes(simt_wave);
        for (int i = 0; i < simt_wave; ++i) lanes[i] = items[first + i].brought;
        items[first].operation(lanes.data());
        ++steps[wave];
    }
    return items[first].state;
}

void forget_shared_accesses();
void start_shared_memory();

void run_workgroup() {
    const int waves = threads / simt_wave;
    std::vector<State> states(waves, RUNNING);
    int wave = -1;
    start_shared_memory();
    for (auto& step : steps) ++step;
    for (;;) {
        std::vector<int> ready;
        for (int w : ordered(0, waves)) {
            if (states[w] == RUNNING) ready.push_back(w);
        }
        if (!ready.empty()) {
            // in a drawn order one wave runs a few steps ahead of the others
            const bool stay = schedule > 1 && wave >= 0 && states[wave] == RUNNING && random_bits() % 4;
            wave = stay ? wave : ready[0];
            const State state = advance(wave);
            states[wave] = state == MEETING ? RUNNING : state;
            continue;
        }
        for (int w = 1; w < waves; ++w) require_same(0, w * simt_wave);
        if (states[0] == DONE) return;
        forget_shared_accesses();
        std::fill(states.begin(), states.end(), RUNNING);
    }
}

// ---------------------------------------------------------------- buffers
// They lie in one reservation, apart from each other: what is in it and in none of them is out of bounds.
struct Access {
    int64 item = -1;  // of all workgroups
    unsigned step;
    void* code;
};
struct Shadow {  // of one byte
    unsigned epoch = 0;
    Access write, read;   // the last of each
    Access same_wave;     // last read by another lane of the wave that read last
    Access other_waves;   // last read by any other wave
};
struct Buffer {
    const char* name;
    unsigned char *begin, *end;
    bool writable;
    std::vector<Shadow> shadow;
};
std::vector<Buffer> buffers;  // in order of addresses; shared memory is the last
unsigned char *arena, *arena_end, *arena_next;
unsigned epoch = 1;

void forget_shared_accesses() { ++epoch; }

void start_shared_memory() {
    const Buffer& shared = buffers.back();
    for (unsigned char* p = shared.begin; p < shared.end; ++p) *p = 0x7fc0deadu >> (p - shared.begin) % 4 * 8;
    forget_shared_accesses();
}

void* add_buffer(const char* name, size_t size, size_t offset, bool writable) {
    unsigned char* begin = arena_next + offset;
    arena_next = begin + size + GAP;
    arena_next += -reinterpret_cast<uintptr_t>(arena_next) & 63;
    buffers.push_back({name, begin, begin + size, writable, {}});
    if (writable) buffers.back().shadow.resize(size);
    return begin;
}

const char* verb(bool write) { return write ? "write" : "read"; }

bool conflict(const Access& before, const Access& now) {
    if (before.item < 0 || before.item == now.item) return false;
    return before.item / simt_wave != now.item / simt_wave || before.step == now.step;
}

void race(const Buffer& buffer, size_t byte, bool wrote, const Access& before, bool writes, const Access& now) {
    if (!conflict(before, now)) return;
    const int item = before.item % threads;
    fail("race on %s, byte %zu: %s at pc %p without a barrier after the %s of workgroup %lld, work-item %d (wave %d, lane %d) at pc %p",
         buffer.name, byte, verb(writes), now.code, verb(wrote), before.item / threads, item, item / simt_wave, item % simt_wave,
         before.code);
}

void record(Buffer& buffer, size_t byte, bool write, const Access& now) {
    Shadow& shadow = buffer.shadow[byte];
    const bool shared = &buffer == &buffers.back();
    if (shared && shadow.epoch != epoch) shadow = Shadow{epoch, {}, {}, {}, {}};
    race(buffer, byte, true, shadow.write, write, now);
    if (write) {
        for (const Access& read : {shadow.read, shadow.same_wave, shadow.other_waves}) race(buffer, byte, false, read, write, now);
        shadow.write = now;
        return;
    }
    if (shadow.read.item >= 0 && shadow.read.item / simt_wave != now.item / simt_wave) {
        shadow.other_waves = shadow.read;
        shadow.same_wave = Access{};
    } else if (shadow.read.item != now.item) {
        shadow.same_wave = shadow.read;
    }
    shadow.read = now;
}

void access(const void* address, size_t bytes, bool write, void* code) {
    const unsigned char* p = static_cast<const unsigned char*>(address);
    if (p < arena || p >= arena_end || current < 0) return;  // a stack or a constant
    auto after = std::upper_bound(buffers.begin(), buffers.end(), p, [](const unsigned char* q, const Buffer& b) { return q < b.begin; });
    if (after == buffers.begin()) fail("%s before all buffers at pc %p", verb(write), code);
    Buffer& buffer = *--after;
    const size_t byte = p - buffer.begin;
    if (p + bytes > buffer.end)
        fail("%s of bytes %zu to %zu of %s, which has %zu, at pc %p", verb(write), byte, byte + bytes - 1, buffer.name,
             static_cast<size_t>(buffer.end - buffer.begin), code);
    if (!buffer.writable) {
        if (write) fail("write to %s, byte %zu, at pc %p", buffer.name, byte, code);
        return;
    }
    const Access now = {static_cast<int64>(program) * threads + current, steps[current / simt_wave], code};
    for (size_t i = 0; i < bytes; ++i) record(buffer, byte + i, write, now);
}
}  // namespace

// ---------------------------------------------------------------- what the kernel calls
namespace simt {
int thread_index() { return current; }
int program_index() { return program; }

void meet(const char* what, int line, Operation operation, void* mine) {
    WorkItem& item = items[current];
    item.what = what;
    item.line = line;
    item.operation = operation;
    item.brought = mine;
    pause_as(MEETING);
}

void barrier(int line) {
    items[current].what = "";
    items[current].line = line;
    pause_as(BARRIER);
}

unsigned char* shared_memory(int bytes, int missing) {
    Buffer& shared = buffers.back();
    if (bytes != shared_bytes) fail("the kernel declares %d bytes of shared memory, the launch %d", bytes, shared_bytes);
    shared.end = shared.begin + bytes - missing;
    if (missing && __asan_poison_memory_region) __asan_poison_memory_region(shared.end, missing);
    return shared.begin;
}

uint32 byte_permute(uint32 a, uint32 b, uint32 selectors) {  // v_perm_b32
    const uint64 bytes = static_cast<uint64>(a) << 32 | b;
    uint32 result = 0;
    for (int i = 0; i < 32; i += 8) {
        const uint32 selector = selectors >> i & 255;
        if (selector > 7 && selector < 12) fail("byte_permute: selector %u spreads a sign", selector);
        result |= (selector < 8 ? static_cast<uint32>(bytes >> selector * 8) & 255 : selector == 12 ? 0u : 255u) << i;
    }
    return result;
}

// The instructions neither read nor write subnormal numbers.
float exp2_of(float x) {
    const float y = exp2f(x);
    return y < 0x1p-126f ? 0.0f : y;
}
float log2_of(float x) { return log2f(fabsf(x) < 0x1p-126f ? 0.0f : x); }

uint16 half_bits(float x) {
    const uint32 bits = as_uint(x), sign = bits >> 16 & 0x8000u, size = bits & 0x7fffffffu;
    if (size > 0x7f800000u) return sign | 0x7e00u;
    if (size >= 0x477ff000u) return sign | 0x7c00u;  // 65520 and more
    // at the right exponent the hardware's own addition rounds: the last place of the sum is binary16's
    const uint32 exponent = std::max(size >> 23, 113u) << 23;
    const float magic = as_float(exponent + (13u << 23));
    const uint32 place = as_uint(as_float(size) + magic) - as_uint(magic);
    return sign | (((exponent >> 23) - 113u) * 1024u + place);
}

float float_of_half(uint16 bits) {
    const uint32 sign = (bits & 0x8000u) << 16, exponent = bits >> 10 & 31u, fraction = bits & 1023u;
    if (exponent == 0) return as_float(sign | as_uint(fraction * 0x1p-24f));
    return as_float(sign | (exponent == 31 ? 0x7f800000u : (exponent + 112u) << 23) | fraction << 13);
}

namespace {
float element(const uint32* words, int i, int bits) {
    if (bits == 32) return as_float(words[i]);
    const uint16 half = static_cast<uint16>(words[i / 2] >> i % 2 * 16);
    if (simt_flushes && !(half & (bits == 16 ? 0x7c00 : 0x7f80))) return 0.0f;
    return bits == 16 ? float_of_half(half) : as_float(static_cast<uint32>(half) << 16);
}
}  // namespace

void multiply(Unit unit, int bits, int side, int depth, Product* const* lanes) {
    const int wave = unit == Unit::MFMA ? 64 : 32;
    const int elements = unit == Unit::WMMA_GFX11 ? depth : side * depth / wave, registers = side * side / wave;
    if (wave != simt_wave) fail("a matrix instruction for waves of %d", wave);
    float a[32][32], b[32][32];  // rows of A, columns of B
    for (int lane = 0; lane < wave; ++lane) {
        for (int i = 0; i < elements; ++i) {
            const int line = lane % side, k = unit == Unit::WMMA_GFX11 ? i : lane / side * elements + i;
            const float of_a = element(lanes[lane]->a, i, bits), of_b = element(lanes[lane]->b, i, bits);
            if (unit == Unit::WMMA_GFX11 && lane >= 16 && (as_uint(of_a) != as_uint(a[line][k]) || as_uint(of_b) != as_uint(b[line][k])))
                fail("wmma_gfx11: operands of lanes %d and %d differ", line, lane);
            a[line][k] = of_a;
            b[line][k] = of_b;
        }
    }
    for (int lane = 0; lane < wave; ++lane) {
        for (int r = 0; r < registers; ++r) {
            const int group = lane / side;
            const int row = unit == Unit::MFMA         ? r / 4 * (256 / side) + group * 4 + r % 4
                            : unit == Unit::WMMA_GFX11 ? 2 * r + group
                                                       : group * 8 + r;
            for (int k = 0; k < depth; ++k) lanes[lane]->c[r] = fmaf(a[row][k], b[lane % side][k], lanes[lane]->c[r]);
        }
    }
}
}  // namespace simt

// The calls of ThreadSanitizer's instrumentation.
extern "C" {
#define SIMT_ACCESS(bytes)                                                                                            \
    void __tsan_read##bytes(void* p) { access(p, bytes, false, __builtin_return_address(0)); }                        \
    void __tsan_write##bytes(void* p) { access(p, bytes, true, __builtin_return_address(0)); }                        \
    void __tsan_unaligned_read##bytes(void* p) { access(p, bytes, false, __builtin_return_address(0)); }              \
    void __tsan_unaligned_write##bytes(void* p) { access(p, bytes, true, __builtin_return_address(0)); }
SIMT_ACCESS(1) SIMT_ACCESS(2) SIMT_ACCESS(4) SIMT_ACCESS(8) SIMT_ACCESS(16)
void __tsan_read_range(void* p, size_t bytes) { access(p, bytes, false, __builtin_return_address(0)); }
void __tsan_write_range(void* p, size_t bytes) { access(p, bytes, true, __builtin_return_address(0)); }
void* __tsan_memcpy(void* to, const void* from, size_t bytes) {
    access(from, bytes, false, __builtin_return_address(0));
    access(to, bytes, true, __builtin_return_address(0));
    return memcpy(to, from, bytes);
}
void* __tsan_memmove(void* to, const void* from, size_t bytes) {
    access(from, bytes, false, __builtin_return_address(0));
    access(to, bytes, true, __builtin_return_address(0));
    return memmove(to, from, bytes);
}
void* __tsan_memset(void* to, int value, size_t bytes) {
    access(to, bytes, true, __builtin_return_address(0));
    return memset(to, value, bytes);
}
void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
}

// ---------------------------------------------------------------- one launch
using simt::fail;

static void receive(void* to, size_t bytes) {
    if (fread(to, 1, bytes, stdin) != bytes) fail("the request is too short");
}

int main() {
    program = -1;
    int32 header[4];
    receive(header, sizeof header);
    programs = header[0], threads = header[1], shared_bytes = header[2], schedule = header[3];
    if (threads != simt_threads) fail("the kernel declares %d work-items, the launch %d", simt_threads, threads);
    if (threads % simt_wave) fail("%d work-items are no whole number of waves", threads);
    random_bits.seed(schedule);
    call.resize(simt_call_bytes);
    receive(call.data(), call.size());

    constexpr size_t RESERVED = size_t(1) << 32;
    void* reserved = mmap(nullptr, RESERVED, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (reserved == MAP_FAILED) fail("no memory");
    arena = static_cast<unsigned char*>(reserved);
    arena_end = arena + RESERVED;
    arena_next = arena + GAP;
    for (int i = 0; i < POINTERS; ++i) {
        int64 size_offset_writable[3];
        receive(size_offset_writable, sizeof size_offset_writable);
        const auto [size, offset, writable] = size_offset_writable;
        if (size < 0) continue;
        pointers[i] = add_buffer(NAMES[i], size, offset, writable);
        receive(pointers[i], size);
    }
    add_buffer(NAMES[POINTERS], shared_bytes, 0, true);
    if (__asan_poison_memory_region) {
        for (size_t i = 0; i <= buffers.size(); ++i) {
            unsigned char* begin = i ? buffers[i - 1].end : arena;
            __asan_poison_memory_region(begin, (i < buffers.size() ? buffers[i].begin : arena_next) - begin);
        }
    }

    items.resize(threads);
    steps.resize(threads / simt_wave);
    for (WorkItem& item : items) {  // a page that cannot be touched lies below each stack
        void* stack = mmap(nullptr, STACK + PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (stack == MAP_FAILED || mprotect(stack, PAGE, PROT_NONE)) fail("no memory for stacks");
        item = WorkItem{};
        item.stack = static_cast<char*>(stack) + PAGE;
    }
    for (int p : ordered(0, programs)) {
        program = p;
        run_workgroup();
    }
    for (const Buffer& buffer : buffers) {
        if (buffer.writable && &buffer != &buffers.back()) fwrite(buffer.begin, 1, buffer.end - buffer.begin, stdout);
    }
    fflush(stdout);
    _exit(0);  // work-items never end
}
