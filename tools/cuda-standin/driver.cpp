// An answer for libcuda and NVRTC: kernels are compiled by g++ and run on the host. Only what flashtile asks for is here.
#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <dlfcn.h>
#include <mutex>
#include <string>
#include <sys/mman.h>
#include <unistd.h>
#include <unordered_map>
#include <vector>

#define API extern "C" __attribute__((visibility("default")))

typedef unsigned long long u64;
typedef unsigned u32;
typedef unsigned char u8;

struct Index3 {
    u32 x, y, z;
};

struct TmaCopy {
    u32 to, barrier;
    int column, head, row, end;
};

static void fail(const char* what) {
    fprintf(stderr, "cuda-standin: %s\n", what);
    _exit(97);
}

// ---- a block of threads: coroutines that run in turn

struct Thread {
    void* stack_pointer;
    u32 index;
    u64 gathers;
    bool ended;
};

// Values that lanes hand each other: two gathers may overlap.
struct Warp {
    u64 values[2][32], arrivals[2];
};

struct NamedBarrier {
    int arrivals;
    u64 phase;
    int any, result;
};

struct MBarrier {
    u32 arrivals, pending;
    int64_t bytes;
    u64 phase;
};

// A box that has not arrived.
struct Flight {
    TmaCopy copy;
    u64 map[8];
    int rounds;
};

constexpr size_t STACK = 512 << 10, MAX_THREADS = 1024, SHARED = 256 << 10;
constexpr int NAMED_BARRIERS = 16;

API u8* standin_shared;
API Index3 standin_block, standin_block_dim, standin_grid;
u8* standin_shared;
Index3 standin_block, standin_block_dim, standin_grid;

static Thread* current;
static void* scheduler;
static Warp warps[MAX_THREADS / 32];
static NamedBarrier named_barriers[NAMED_BARRIERS];
static std::unordered_map<u32, MBarrier> mbarriers;
static std::vector<Flight> flights;
// Changes for which threads may wait: rounds without any are a deadlock.
static u64 events;
static void (*kernel)(void**);
static void** kernel_arguments;

// Saves the registers that a call keeps and the stack pointer, and goes on where `to` was saved.
extern "C" void standin_switch(void** saved, void* to);
asm(R"(
.text
.globl standin_switch
standin_switch:
    push %rbp
    push %rbx
    push %r12
    push %r13
    push %r14
    push %r15
    mov %rsp, (%rdi)
    mov %rsi, %rsp
    pop %r15
    pop %r14
    pop %r13
    pop %r12
    pop %rbx
    pop %rbp
    ret
)");

API u32 standin_thread() { return current->index; }

API void standin_yield() { standin_switch(&current->stack_pointer, scheduler); }

API void standin_gather(u64 value, u64* all) {
    Warp& warp = warps[current->index / 32];
    u64 gather = current->gathers++, half = gather % 2;
    warp.values[half][current->index % 32] = value;
    warp.arrivals[half]++;
    events++;
    while (warp.arrivals[half] < 32 * (gather / 2 + 1)) standin_yield();
    memcpy(all, warp.values[half], sizeof warp.values[half]);
}

API void standin_barrier(int index, int threads, int waits) {
    NamedBarrier& barrier = named_barriers[index];
    u64 phase = barrier.phase;
    events++;
    if (++barrier.arrivals == threads) {
        barrier.result = barrier.any;
        barrier.arrivals = barrier.any = 0;
        barrier.phase++;
    } else if (waits) {
        while (barrier.phase == phase) standin_yield();
    }
}

API int standin_barrier_any(int index, int threads, int x) {
    named_barriers[index].any |= x;
    standin_barrier(index, threads, 1);
    return named_barriers[index].result;
}

static MBarrier& mbarrier(u32 at) {
    auto found = mbarriers.find(at);
    if (found == mbarriers.end()) fail("an mbarrier is used that was not made");
    return found->second;
}

static void end_phase_if_complete(MBarrier& barrier) {
    events++;
    if (barrier.pending || barrier.bytes) return;
    barrier.phase++;
    barrier.pending = barrier.arrivals;
}

API void standin_mbarrier_init(u32 at, u32 arrivals) { mbarriers[at] = {arrivals, arrivals, 0, 0}; }

API void standin_mbarrier_arrive(u32 at, u32 bytes) {
    MBarrier& barrier = mbarrier(at);
    if (barrier.pending == 0) fail("more threads arrive at an mbarrier than it counts");
    barrier.bytes += bytes;
    barrier.pending--;
    end_phase_if_complete(barrier);
}

API int standin_mbarrier_ended(u32 at, u32 parity) { return (mbarrier(at).phase & 1) != parity; }

// ---- TMA

// The words of a map of this library: what `RaggedRows` needs.
enum { MAP_ADDRESS, MAP_COLUMNS, MAP_HEADS, MAP_HEAD_BYTES, MAP_ROW_BYTES, MAP_BOX_COLUMNS, MAP_BOX_HEADS, MAP_BOX_ROWS };
constexpr int64_t RAGGED_ROWS = 1 << 30;

API void standin_tma(TmaCopy copy, const u64* map) {
    Flight flight = {copy, {}, rand() % 4};
    memcpy(flight.map, map, sizeof flight.map);
    flights.push_back(flight);
    events++;
}

static void land(const Flight& flight) {
    const auto& [copy, map, rounds] = flight;
    int64_t bytes = 0;
    for (u64 n = 0; n < map[MAP_BOX_ROWS] * map[MAP_BOX_HEADS] * map[MAP_BOX_COLUMNS]; n++, bytes += 2) {
        u64 column = n % map[MAP_BOX_COLUMNS], smem_row = n / map[MAP_BOX_COLUMNS];
        u64 head = copy.head + smem_row % map[MAP_BOX_HEADS];
        int64_t row = (int64_t)copy.row + smem_row / map[MAP_BOX_HEADS];
        u64 from_column = copy.column + column;
        u32 to = copy.to + smem_row * 128 + column * 2;
        uint16_t x = 0;
        if (row >= 0 && row < RAGGED_ROWS && head < map[MAP_HEADS] && from_column < map[MAP_COLUMNS])
            memcpy(&x, (void*)(map[MAP_ADDRESS] + (row - RAGGED_ROWS + copy.end) * map[MAP_ROW_BYTES] + head * map[MAP_HEAD_BYTES] + from_column * 2), 2);
        memcpy(standin_shared + (to ^ (to >> 7 & 7) << 4), &x, 2);
    }
    MBarrier& barrier = mbarrier(copy.barrier);
    barrier.bytes -= bytes;
    end_phase_if_complete(barrier);
}

static void land_some() {
    for (size_t n = 0; n < flights.size();) {
        if (flights[n].rounds-- > 0) {
            n++, events++;
            continue;
        }
        Flight flight = flights[n];
        flights.erase(flights.begin() + n);
        land(flight);
    }
}

// ---- launches

static void run_thread() {
    kernel(kernel_arguments);
    current->ended = true;
    events++;
    for (;;) standin_yield();
}

static void report_deadlock() {
    fprintf(stderr, "cuda-standin: threads of block %u wait forever\n", standin_block.x);
    for (const auto& [at, barrier] : mbarriers)
        fprintf(stderr, "  mbarrier %u: %u arrivals and %lld bytes missing, phase %llu\n", at, barrier.pending, (long long)barrier.bytes, barrier.phase);
    for (int n = 0; n < NAMED_BARRIERS; n++)
        if (named_barriers[n].arrivals) fprintf(stderr, "  named barrier %d: %d threads\n", n, named_barriers[n].arrivals);
    fail("deadlock");
}

static std::vector<Thread> start_threads(u32 count) {
    static u8* stacks = (u8*)mmap(nullptr, STACK * MAX_THREADS, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    std::vector<Thread> threads(count);
    for (u32 n = 0; n < count; n++) {
        // The first switch pops six registers and the address of `run_thread`.
        u64* end = (u64*)(stacks + STACK * (n + 1));
        memset(end - 8, 0, 6 * 8);
        end[-2] = (u64)run_thread;
        threads[n] = {end - 8, n, 0, false};
    }
    return threads;
}

static void run_block(u32 count) {
    memset(warps, 0, sizeof warps);
    memset(named_barriers, 0, sizeof named_barriers);
    mbarriers.clear();
    memset(standin_shared, 0xff, SHARED);
    std::vector<Thread> threads = start_threads(count);
    for (bool running = true; running;) {
        u64 before = events;
        running = false;
        for (Thread& thread : threads) {
            if (thread.ended) continue;
            running = true;
            current = &thread;
            standin_switch(&scheduler, thread.stack_pointer);
        }
        land_some();
        if (running && events == before) report_deadlock();
    }
    if (!flights.empty()) fail("a block ends before its copies by TMA");
}

API int cuLaunchKernel(void* function, u32 grid_x, u32 grid_y, u32 grid_z, u32 threads, u32, u32, u32, void*, void** arguments, void**) {
    static std::mutex one_at_a_time;
    std::lock_guard<std::mutex> guard(one_at_a_time);
    if (!standin_shared) standin_shared = (u8*)aligned_alloc(1024, SHARED);
    kernel = (void (*)(void**))function;
    kernel_arguments = arguments;
    standin_block_dim = {threads, 1, 1}, standin_grid = {grid_x, grid_y, grid_z};
    for (u32 z = 0; z < grid_z; z++)
        for (u32 y = 0; y < grid_y; y++)
            for (u32 x = 0; x < grid_x; x++) {
                standin_block = {x, y, z};
                run_block(threads);
            }
    return 0;
}

API int cuTensorMapEncodeTiled(void* map, int, u32 rank, void* at, const u64* dims, const u64* strides, const u32* box, const u32*, int, int, int, int) {
    if (rank != 5 || dims[2] != RAGGED_ROWS || strides[2] != (2ull << 34) - strides[1] || strides[3] != strides[1]) fail("a map is not ragged");
    u64 words[8] = {(u64)at, dims[0], dims[1], strides[0], strides[1], box[0], box[1], box[2]};
    memcpy(map, words, sizeof words);
    return 0;
}

// ---- NVRTC: machine code is the path of a library

struct Program {
    std::string source, library, log;
};

API int nvrtcVersion(int* major, int* minor) { return *major = 13, *minor = 0, 0; }
API const char* nvrtcGetErrorString(int) { return "refused by the stand-in"; }
API int nvrtcGetNumSupportedArchs(int* count) { return *count = 2, 0; }
API int nvrtcGetSupportedArchs(int* archs) { return archs[0] = 80, archs[1] = 90, 0; }
API int nvrtcCreateProgram(Program** program, const char* source, const char*, int, const char* const*, const char* const*) { return *program = new Program{source}, 0; }
API int nvrtcDestroyProgram(Program** program) { return delete *program, 0; }

static std::string quoted(const std::string& path) { return "'" + path + "'"; }

API int nvrtcCompileProgram(Program* program, int, const char* const*) {
    static std::atomic<int> count;
    const char *folder = getenv("CUDA_STANDIN_FOLDER"), *build = getenv("CUDA_STANDIN_BUILD");
    if (!folder || !build) fail("run.sh starts it");
    std::string base = std::string(build) + "/" + std::to_string(getpid()) + "-" + std::to_string(count++);
    FILE* file = fopen((base + ".cu").c_str(), "w");
    if (!file || fwrite(program->source.data(), 1, program->source.size(), file) != program->source.size() || fclose(file)) fail("a program is not written");
    std::string command = "python3 -B " + quoted(std::string(folder) + "/program.py") + " " + quoted(base + ".cu") + " " + quoted(base + ".cpp") +
                          " && g++ -std=c++17 -O1 -w -fno-strict-aliasing -fPIC -shared -mf16c -mfma -I" + quoted(std::string(folder) + "/include") + " -o " +
                          quoted(base + ".so") + " " + quoted(base + ".cpp") + " -L" + quoted(build) + " -l:libcuda.so.1";
    int status = system(("(" + command + ") > " + quoted(base + ".log") + " 2>&1").c_str());
    program->library = base + ".so";
    if (FILE* log = fopen((base + ".log").c_str(), "r")) {
        char text[4000];
        program->log.assign(text, fread(text, 1, sizeof text, log));
        fclose(log);
    }
    return status ? 6 : 0;
}

static int text_size(const std::string& text, size_t* size) { return *size = text.size() + 1, 0; }
static int copy_text(const std::string& text, char* to) { return memcpy(to, text.c_str(), text.size() + 1), 0; }
API int nvrtcGetProgramLogSize(Program* program, size_t* size) { return text_size(program->log, size); }
API int nvrtcGetProgramLog(Program* program, char* to) { return copy_text(program->log, to); }
API int nvrtcGetCUBINSize(Program* program, size_t* size) { return text_size(program->library, size); }
API int nvrtcGetCUBIN(Program* program, char* to) { return copy_text(program->library, to); }
API int nvrtcGetPTXSize(Program* program, size_t* size) { return text_size(program->library, size); }
API int nvrtcGetPTX(Program* program, char* to) { return copy_text(program->library, to); }

API int cuModuleLoadData(void** module, const void* image) {
    *module = dlopen((const char*)image, RTLD_NOW | RTLD_LOCAL);
    if (!*module) fprintf(stderr, "cuda-standin: %s\n", dlerror());
    return *module ? 0 : 209;
}
API int cuModuleUnload(void*) { return 0; }
API int cuModuleGetFunction(void** function, void* module, const char* name) {
    *function = dlsym(module, (std::string("entry_") + name).c_str());
    return *function ? 0 : 500;
}
API int cuFuncSetAttribute(void*, int, int) { return 0; }
API int cuFuncGetAttribute(int* value, int, void*) { return *value = 64, 0; }

// ---- the device: one, of compute capability 9.0, in one context. Streams do at once what they are given.

API int cuInit(u32) { return 0; }
API int cuDriverGetVersion(int* version) { return *version = 13000, 0; }
API int cuDeviceGetCount(int* count) { return *count = 1, 0; }
API int cuDeviceGet(int* device, int) { return *device = 0, 0; }
API int cuDeviceGetName(char* name, int size, int) { return snprintf(name, size, "the host"), 0; }
API int cuDeviceGetUuid_v2(void* uuid, int) { return memset(uuid, 0, 16), 0; }
API int cuDeviceTotalMem_v2(size_t* bytes, int) { return *bytes = 8ull << 30, 0; }
API int cuDeviceGetAttribute(int* value, int attribute, int) {
    const char* multiprocessors = getenv("CUDA_STANDIN_MULTIPROCESSORS");
    // Attributes by their numbers in cuda.h.
    static const std::unordered_map<int, int> attributes = {{1, 1024}, {8, 48 << 10}, {10, 32}, {12, 65536}, {38, 50 << 20}, {39, 2048}, {75, 9}, {76, 0}, {81, 228 << 10}, {82, 65536}, {97, 227 << 10}, {115, 0}};
    auto found = attributes.find(attribute);
    *value = attribute == 16 ? (multiprocessors ? atoi(multiprocessors) : 4) : found == attributes.end() ? 1 : found->second;
    return 0;
}

static void* const CONTEXT = (void*)1;
API int cuDevicePrimaryCtxRetain(void** context, int) { return *context = CONTEXT, 0; }
API int cuDevicePrimaryCtxRelease_v2(int) { return 0; }
API int cuCtxSetCurrent(void*) { return 0; }
API int cuCtxGetCurrent(void** context) { return *context = CONTEXT, 0; }
API int cuCtxGetDevice(int* device) { return *device = 0, 0; }
API int cuCtxSynchronize() { return 0; }
API int cuMemGetInfo_v2(size_t* free, size_t* total) { return *free = *total = 8ull << 30, 0; }

API int cuMemAlloc_v2(u64* at, size_t bytes) {
    size_t size = (bytes + 1023) / 1024 * 1024 + 1024;
    void* memory = aligned_alloc(1024, size);
    memset(memory, 0xee, size);
    return *at = (u64)memory, 0;
}
API int cuMemAllocAsync(u64* at, size_t bytes, void*) { return cuMemAlloc_v2(at, bytes); }
API int cuMemFree_v2(u64 at) { return free((void*)at), 0; }
API int cuMemFreeAsync(u64 at, void*) { return free((void*)at), 0; }
API int cuMemAllocHost_v2(void** at, size_t bytes) { return *at = malloc(bytes), 0; }
API int cuMemHostAlloc(void** at, size_t bytes, u32) { return *at = malloc(bytes), 0; }
API int cuMemFreeHost(void* at) { return free(at), 0; }
API int cuMemcpyHtoD_v2(u64 to, const void* from, size_t bytes) { return memcpy((void*)to, from, bytes), 0; }
API int cuMemcpyHtoDAsync_v2(u64 to, const void* from, size_t bytes, void*) { return memcpy((void*)to, from, bytes), 0; }
API int cuMemcpyDtoH_v2(void* to, u64 from, size_t bytes) { return memcpy(to, (void*)from, bytes), 0; }
API int cuMemcpyDtoHAsync_v2(void* to, u64 from, size_t bytes, void*) { return memcpy(to, (void*)from, bytes), 0; }
API int cuMemcpyDtoDAsync_v2(u64 to, u64 from, size_t bytes, void*) { return memcpy((void*)to, (void*)from, bytes), 0; }
API int cuMemsetD8_v2(u64 to, u8 x, size_t bytes) { return memset((void*)to, x, bytes), 0; }
API int cuMemsetD8Async(u64 to, u8 x, size_t bytes, void*) { return memset((void*)to, x, bytes), 0; }

static int new_handle(void** handle) { return *handle = malloc(1), 0; }
API int cuStreamCreate(void** stream, u32) { return new_handle(stream); }
API int cuStreamDestroy_v2(void* stream) { return free(stream), 0; }
API int cuStreamSynchronize(void*) { return 0; }
API int cuStreamQuery(void*) { return 0; }
API int cuStreamWaitEvent(void*, void*, u32) { return 0; }
API int cuStreamIsCapturing(void*, int* status) { return *status = 0, 0; }
API int cuStreamGetCaptureInfo_v2(void*, int* status, u64*, void**, const void***, size_t*) { return *status = 0, 0; }
API int cuEventCreate(void** event, u32) { return new_handle(event); }
API int cuEventDestroy_v2(void* event) { return free(event), 0; }
API int cuEventRecord(void*, void*) { return 0; }
API int cuEventSynchronize(void*) { return 0; }
API int cuEventQuery(void*) { return 0; }
API int cuEventElapsedTime_v2(float* milliseconds, void*, void*) { return *milliseconds = 1, 0; }
API int cuGetErrorName(int, const char** name) { return *name = "refused by the stand-in", 0; }
API int cuGetErrorString(int, const char** text) { return *text = "refused by the stand-in", 0; }
