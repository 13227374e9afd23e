// An answer for libcuda and NVRTC: kernels are compiled by g++ and run on the host. Only what flashtile asks for is here.
#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <dlfcn.h>
#include <functional>
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

// Where a box that TMA copies is in a tensor (`RaggedRows`).
struct TmaBox {
    int column, head, row, end;
};

static void fail(const char* what) {
    fprintf(stderr, "cuda-standin: %s\n", what);
    _exit(97);
}

// ---- a cluster of blocks: threads are coroutines that run in turn

struct Block;

// A pending cp.async: the thread has not waited for its group.
struct CpAsync {
    u32 to;
    const void* from;
    u32 bytes;
    u64 group;
};

struct Thread {
    void* stack_pointer;
    u32 index;
    u64 gathers;
    bool ended;
    // Copies to device memory that have not ended.
    u32 copies;
    std::deque<CpAsync> cp_async;
    u64 groups;
};

// Values that lanes hand each other: two gathers may overlap.
struct Warp {
    u64 values[2][32], arrivals[2];
    // Rounds that it does not run.
    u32 waits;
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

// A copy in flight.
struct Flight {
    std::function<void()> land;
    int rounds;
};

constexpr size_t STACK = 512 << 10, MAX_THREADS = 1024, SHARED = 256 << 10;
constexpr int NAMED_BARRIERS = 16;
constexpr u32 MAX_CLUSTER = 8, ADDRESS_BITS = 18;

struct Block {
    u8* shared;
    Index3 index;
    std::vector<Thread> threads;
    Warp warps[MAX_THREADS / 32];
    NamedBarrier named_barriers[NAMED_BARRIERS], cluster_barrier;
    std::unordered_map<u32, MBarrier> mbarriers;
};

API u8* standin_shared;
API Index3 standin_block, standin_block_dim, standin_grid;
API u32 standin_cluster;
u8* standin_shared;
Index3 standin_block, standin_block_dim, standin_grid;
u32 standin_cluster;

static Block blocks[MAX_CLUSTER];
static Block* block;
static Thread* current;
static void* scheduler;
static std::vector<Flight> flights;
// Changes for which threads may wait: a hundred rounds without any are a deadlock. A thread that polls a word of device memory takes two to see it.
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
    Warp& warp = block->warps[current->index / 32];
    u64 gather = current->gathers++, half = gather % 2;
    warp.values[half][current->index % 32] = value;
    warp.arrivals[half]++;
    events++;
    while (warp.arrivals[half] < 32 * (gather / 2 + 1)) standin_yield();
    memcpy(all, warp.values[half], sizeof warp.values[half]);
}

static void arrive(NamedBarrier& barrier, int threads, int waits) {
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

API void standin_barrier(int index, int threads, int waits) { arrive(block->named_barriers[index], threads, waits); }

API int standin_barrier_any(int index, int threads, int x) {
    block->named_barriers[index].any |= x;
    standin_barrier(index, threads, 1);
    return block->named_barriers[index].result;
}

API u32 standin_cluster_rank() { return block - blocks; }

// All threads of the cluster arrive at the first block's.
API void standin_cluster_barrier() { arrive(blocks[0].cluster_barrier, standin_cluster * standin_block_dim.x, 1); }

// The place of an address in shared memory: of the block that runs, or of the one whose number it has.
struct Place {
    Block* block;
    u32 at;

    explicit Place(u32 address) : block(address >> ADDRESS_BITS ? &blocks[(address >> ADDRESS_BITS) - 1] : ::block), at(address % SHARED) {
        if (block >= blocks + standin_cluster) fail("an address is of a block that the cluster does not have");
    }
    u8* memory() const { return block->shared + at; }
    MBarrier& mbarrier() const {
        auto found = block->mbarriers.find(at);
        if (found == block->mbarriers.end()) fail("an mbarrier is used that was not made");
        return found->second;
    }
};

static void end_phase_if_complete(MBarrier& barrier) {
    events++;
    if (barrier.pending || barrier.bytes) return;
    barrier.phase++;
    barrier.pending = barrier.arrivals;
}

API void standin_mbarrier_init(u32 at, u32 arrivals) { block->mbarriers[at] = {arrivals, arrivals, 0, 0}; }

API void standin_mbarrier_arrive(u32 at, u32 bytes) {
    MBarrier& barrier = Place(at).mbarrier();
    if (barrier.pending == 0) fail("more threads arrive at an mbarrier than it counts");
    barrier.bytes += bytes;
    barrier.pending--;
    end_phase_if_complete(barrier);
}

API int standin_mbarrier_ended(u32 at, u32 parity) { return (Place(at).mbarrier().phase & 1) != parity; }

// ---- copies that arrive late, in any order

static void fly(std::function<void()> land) {
    flights.push_back({land, rand() % 4});
    events++;
}

static void count_bytes(const Place& barrier, int64_t bytes) {
    barrier.mbarrier().bytes -= bytes;
    end_phase_if_complete(barrier.mbarrier());
}

// The words of a map of this library: what `RaggedRows` needs.
enum { MAP_ADDRESS, MAP_COLUMNS, MAP_HEADS, MAP_HEAD_BYTES, MAP_ROW_BYTES, MAP_BOX_COLUMNS, MAP_BOX_HEADS, MAP_BOX_ROWS, MAP_WORDS };
constexpr int64_t RAGGED_ROWS = 1 << 30;

struct Map {
    u64 words[MAP_WORDS];

    explicit Map(const u64* from) { memcpy(words, from, sizeof words); }

    // Calls `copy` with the place of each element of a box, of 16 bits, in shared memory and in the tensor; the latter is null outside.
    void each_element(u32 at, const TmaBox& box, const std::function<void(u32, void*)>& copy) const {
        for (u64 n = 0; n < words[MAP_BOX_ROWS] * words[MAP_BOX_HEADS] * words[MAP_BOX_COLUMNS]; n++) {
            u64 in_box = n % words[MAP_BOX_COLUMNS], smem_row = n / words[MAP_BOX_COLUMNS];
            u64 head = box.head + smem_row % words[MAP_BOX_HEADS], column = box.column + in_box;
            int64_t row = (int64_t)box.row + smem_row / words[MAP_BOX_HEADS];
            u32 in_shared = at + smem_row * 128 + in_box * 2;
            bool exists = row >= 0 && row < RAGGED_ROWS && head < words[MAP_HEADS] && column < words[MAP_COLUMNS];
            u64 in_tensor = words[MAP_ADDRESS] + (row - RAGGED_ROWS + box.end) * words[MAP_ROW_BYTES] + head * words[MAP_HEAD_BYTES] + column * 2;
            copy(in_shared ^ (in_shared >> 7 & 7) << 4, exists ? (void*)in_tensor : nullptr);
        }
    }

    int64_t bytes() const { return 2 * words[MAP_BOX_ROWS] * words[MAP_BOX_HEADS] * words[MAP_BOX_COLUMNS]; }
};

static void land_box(Block* to_block, u32 to, u32 barrier, const TmaBox& box, const Map& map) {
    map.each_element(to, box, [&](u32 in_shared, void* in_tensor) {
        uint16_t x = 0;
        if (in_tensor) memcpy(&x, in_tensor, 2);
        memcpy(to_block->shared + in_shared, &x, 2);
    });
    Place counted(barrier);
    counted.block = to_block;
    count_bytes(counted, map.bytes());
}

API void standin_tma(u32 to, u32 barrier, TmaBox box, const u64* words, u32 count) {
    Map map(words);
    for (Block* each = count ? blocks : block; each <= (count ? blocks + count - 1 : block); each++)
        fly([=] { land_box(each, to, barrier, box, map); });
}

// A copy to device memory, which the thread waits for.
static void fly_out(std::function<void()> land) {
    Thread* thread = current;
    thread->copies++;
    fly([=] { land(), thread->copies--, events++; });
}

API void standin_tma_store(u32 from, TmaBox box, const u64* words) {
    Map map(words);
    u8* shared = standin_shared;
    fly_out([=] {
        map.each_element(from, box, [&](u32 in_shared, void* in_tensor) {
            if (in_tensor) memcpy(in_tensor, shared + in_shared, 2);
        });
    });
}

API void standin_copy_shared(u32 to, u32 from, u32 bytes, u32 barrier) {
    Place source(from), target(to), counted(barrier);
    fly([=] { memcpy(target.memory(), source.memory(), bytes), count_bytes(counted, bytes); });
}

API void standin_copy_in(u32 to, const void* from, u32 bytes, u32 barrier) {
    Place target(to), counted(barrier);
    fly([=] { memcpy(target.memory(), from, bytes), count_bytes(counted, bytes); });
}

API void standin_copy_out(void* to, u32 from, u32 bytes, int add) {
    Place source(from);
    fly_out([=] {
        if (!add) memcpy(to, source.memory(), bytes);
        for (u32 n = 0; add && n < bytes / 4; n++) ((float*)to)[n] += ((float*)source.memory())[n];
    });
}

API void standin_wait_copies() {
    while (current->copies) standin_yield();
}

// cp.async is as late as it may be: a copy is done when the thread waits for its group.
API void standin_cp_async(u32 to, const void* from, u32 bytes) { current->cp_async.push_back({to, from, bytes, current->groups}); }

API void standin_cp_async_commit() { current->groups++; }

API void standin_cp_async_wait(int pending) {
    auto& copies = current->cp_async;
    while (!copies.empty() && copies.front().group + pending < current->groups) {
        const auto [to, from, bytes, group] = copies.front();
        memset(block->shared + to, 0, 16);
        if (bytes) memcpy(block->shared + to, from, bytes);
        copies.pop_front();
    }
}

static void land_some() {
    for (size_t n = 0; n < flights.size();) {
        if (flights[n].rounds-- > 0) {
            n++, events++;
            continue;
        }
        std::function<void()> land = flights[n].land;
        flights.erase(flights.begin() + n);
        land();
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
    for (u32 n = 0; n < standin_cluster; n++) {
        fprintf(stderr, "cuda-standin: threads of block %u wait forever\n", blocks[n].index.x);
        for (const auto& [at, barrier] : blocks[n].mbarriers)
            fprintf(stderr, "  mbarrier %u: %u arrivals and %lld bytes missing, phase %llu\n", at, barrier.pending, (long long)barrier.bytes, barrier.phase);
        for (int i = 0; i < NAMED_BARRIERS; i++)
            if (blocks[n].named_barriers[i].arrivals) fprintf(stderr, "  named barrier %d: %d threads\n", i, blocks[n].named_barriers[i].arrivals);
    }
    fail("deadlock");
}

static void start_block(u32 rank, Index3 index) {
    static u8* stacks = (u8*)mmap(nullptr, STACK * MAX_THREADS * MAX_CLUSTER, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    Block& started = blocks[rank];
    if (!started.shared) started.shared = (u8*)aligned_alloc(1024, SHARED);
    memset(started.shared, 0xff, SHARED);
    memset(started.warps, 0, sizeof started.warps);
    memset(started.named_barriers, 0, sizeof started.named_barriers);
    started.cluster_barrier = {};
    started.mbarriers.clear();
    started.index = index;
    started.threads.resize(standin_block_dim.x);
    for (u32 n = 0; n < standin_block_dim.x; n++) {
        // The first switch pops six registers and the address of `run_thread`.
        u64* end = (u64*)(stacks + STACK * (rank * MAX_THREADS + n + 1));
        memset(end - 8, 0, 6 * 8);
        end[-2] = (u64)run_thread;
        started.threads[n] = {end - 8, n, 0, false, 0, {}, 0};
    }
}

static void run_cluster() {
    int idle = 0;
    for (bool running = true; running;) {
        u64 before = events;
        running = false;
        bool waited = false;
        for (u32 rank = 0; rank < standin_cluster; rank++) {
            block = &blocks[rank];
            standin_shared = block->shared, standin_block = block->index;
            for (size_t first = 0; first < block->threads.size(); first += 32) {
                // Now and then a warp waits for many rounds, so that others run far ahead of it wherever no barrier holds them.
                u32& rounds = block->warps[first / 32].waits;
                if (rounds == 0 && rand() % 256 == 0) rounds = rand() % 128;
                if (rounds > 0) {
                    rounds--, waited = running = true;
                    continue;
                }
                for (size_t n = first; n < block->threads.size() && n < first + 32; n++) {
                    Thread& thread = block->threads[n];
                    if (thread.ended) continue;
                    running = true;
                    current = &thread;
                    standin_switch(&scheduler, thread.stack_pointer);
                }
            }
        }
        land_some();
        idle = waited || events != before ? 0 : idle + 1;
        if (running && idle > 100) report_deadlock();
    }
    if (!flights.empty()) fail("a block ends before its copies");
}

struct Function {
    void (*entry)(void**);
    u32 cluster;
};

API int cuLaunchKernel(Function* function, u32 grid_x, u32 grid_y, u32 grid_z, u32 threads, u32, u32, u32, void*, void** arguments, void**) {
    static std::mutex one_at_a_time;
    std::lock_guard<std::mutex> guard(one_at_a_time);
    kernel = function->entry;
    kernel_arguments = arguments;
    standin_block_dim = {threads, 1, 1}, standin_grid = {grid_x, grid_y, grid_z}, standin_cluster = function->cluster;
    if (grid_x % standin_cluster) fail("a grid is not of whole clusters");
    for (u32 z = 0; z < grid_z; z++)
        for (u32 y = 0; y < grid_y; y++)
            for (u32 x = 0; x < grid_x; x += standin_cluster) {
                for (u32 rank = 0; rank < standin_cluster; rank++) start_block(rank, {x + rank, y, z});
                run_cluster();
            }
    return 0;
}

API int cuTensorMapEncodeTiled(void* map, int, u32 rank, void* at, const u64* dims, const u64* strides, const u32* box, const u32*, int, int, int, int) {
    if (rank != 5 || dims[2] != RAGGED_ROWS || strides[2] != (2ull << 34) - strides[1] || strides[3] != strides[1]) fail("a map is not ragged");
    u64 words[MAP_WORDS] = {(u64)at, dims[0], dims[1], strides[0], strides[1], box[0], box[1], box[2]};
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
API int cuModuleGetFunction(Function** function, void* module, const char* name) {
    void *entry = dlsym(module, (std::string("entry_") + name).c_str()), *cluster = dlsym(module, (std::string("cluster_of_") + name).c_str());
    if (!entry || !cluster) return 500;
    *function = new Function{(void (*)(void**))entry, *(u32*)cluster};
    return 0;
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
    static const std::unordered_map<int, int> attributes = {{1, 1024}, {5, 0x7fffffff}, {6, 65535}, {7, 65535}, {8, 48 << 10}, {10, 32}, {12, 65536}, {38, 50 << 20}, {39, 2048}, {75, 9}, {76, 0}, {81, 228 << 10}, {82, 65536}, {97, 227 << 10}, {115, 0}};
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
