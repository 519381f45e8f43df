/* A CUDA runtime without a GPU: device memory is host memory, copies are real, kernels do nothing.

   So values mean nothing. What onnxruntime asks for is counted, apart for calls that a CUDA graph captures. A captured call
   is carried out at once as well; replays do nothing but compare the host memory that captured copies read. */

#include <cuda_runtime_api.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define API __attribute__((visibility("default")))
#define KINDS 5       /* of cudaMemcpyKind */
#define BEST 16       /* tokens of a row that token selection returns */
#define FIRST 32      /* of them: an ordinary token in the vocabularies of small models */
#define SMALL 128     /* bytes of the largest copy from the host that is compared at replays */
#define MEMORY (80ul << 30)

struct counts {
    long kernels, products;
    long waits; /* allocations and synchronizations, which a capture forbids */
    long copies[KINDS], bytes[KINDS], largest[KINDS];
};

API struct counts stand_in_counts[2]; /* outside and within captures */
API long stand_in_captures, stand_in_replays;
API long stand_in_stale; /* copies that would read other bytes than at the capture, over all replays */

struct kernel {
    const void *function; /* of the host, which launches it */
    const char *name;
    long launches; /* within captures */
};

API struct kernel *stand_in_kernels;
API long stand_in_kernel_count;

struct source {
    int graph;
    const void *address;
    size_t size;
    unsigned char content[SMALL];
};

static struct source *sources;
static size_t source_count, source_room;
static int capturing, graph_count;

static struct counts *counts(void) { return &stand_in_counts[capturing]; }

static cudaError_t waited(void) {
    counts()->waits++;
    return cudaSuccess;
}

static void remember(const void *address, size_t size) {
    if (source_count == source_room) {
        source_room = source_room ? 2 * source_room : 1024;
        sources = realloc(sources, source_room * sizeof *sources);
    }
    struct source *source = &sources[source_count++];
    source->graph = graph_count;
    source->address = address;
    source->size = size;
    memcpy(source->content, address, size);
}

/* The best tokens of rows, which no kernel has computed: BEST logits, as many tokens, and the logarithm of the sum of all
   exponentials. Tokens that are all 0 would be no answer of a device: here they differ, and none is likely. */
static void invent_tokens(float *target, size_t rows) {
    for (size_t row = 0; row < rows; row++, target += 2 * BEST + 1) {
        for (int number = 0; number < BEST; number++) {
            target[number] = -0.1f * number;
            target[BEST + number] = FIRST + number;
        }
        target[2 * BEST] = 5;
    }
}

static int is_zero(const unsigned char *bytes, size_t size) {
    return !size || (!bytes[0] && !memcmp(bytes, bytes + 1, size - 1));
}

static cudaError_t copy(void *target, const void *source, size_t size, enum cudaMemcpyKind kind) {
    struct counts *now = counts();
    if (kind < KINDS) {
        now->copies[kind]++;
        now->bytes[kind] += size;
        if ((long)size > now->largest[kind]) now->largest[kind] = size;
    }
    if (capturing && kind == cudaMemcpyHostToDevice && size <= SMALL) remember(source, size);
    memmove(target, source, size);
    size_t row = (2 * BEST + 1) * sizeof(float);
    if (kind == cudaMemcpyDeviceToHost && size % row == 0 && is_zero(target, size)) invent_tokens(target, size / row);
    return cudaSuccess;
}

static cudaError_t launched(const void *function) {
    counts()->kernels++;
    for (long number = 0; capturing && number < stand_in_kernel_count; number++)
        stand_in_kernels[number].launches += stand_in_kernels[number].function == function;
    return cudaSuccess;
}

API int stand_in_product(void) {
    counts()->products++;
    return 0;
}

API void stand_in_reset(void) {
    memset(stand_in_counts, 0, sizeof stand_in_counts);
    stand_in_captures = stand_in_replays = stand_in_stale = 0;
    for (long number = 0; number < stand_in_kernel_count; number++) stand_in_kernels[number].launches = 0;
}

/* Memory */

static cudaError_t allocate(void **address, size_t size) {
    waited();
    if (posix_memalign(address, 512, size ? size : 1)) return cudaErrorMemoryAllocation;
    memset(*address, 0, size);
    return cudaSuccess;
}

static cudaError_t release(void *address) {
    free(address);
    return waited();
}

API cudaError_t cudaMalloc(void **address, size_t size) { return allocate(address, size); }
API cudaError_t cudaMallocFromPoolAsync(void **address, size_t size, cudaMemPool_t pool, cudaStream_t stream) {
    return allocate(address, size);
}
API cudaError_t cudaMallocHost(void **address, size_t size) { return allocate(address, size); }
API cudaError_t cudaHostAlloc(void **address, size_t size, unsigned flags) { return allocate(address, size); }
API cudaError_t cudaFree(void *address) { return release(address); }
API cudaError_t cudaFreeAsync(void *address, cudaStream_t stream) { return release(address); }
API cudaError_t cudaFreeHost(void *address) { return release(address); }
API cudaError_t cudaMemGetInfo(size_t *left, size_t *total) {
    *left = *total = MEMORY;
    return cudaSuccess;
}
API cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *found, const void *address) {
    memset(found, 0, sizeof *found);
    found->type = cudaMemoryTypeDevice;
    found->devicePointer = (void *)address;
    return cudaSuccess;
}

/* Copies */

API cudaError_t cudaMemcpy(void *target, const void *source, size_t size, enum cudaMemcpyKind kind) {
    waited();
    return copy(target, source, size, kind);
}
API cudaError_t cudaMemcpyAsync(
    void *target, const void *source, size_t size, enum cudaMemcpyKind kind, cudaStream_t stream) {
    return copy(target, source, size, kind);
}
API cudaError_t cudaMemcpy2DAsync(void *target, size_t target_pitch, const void *source, size_t source_pitch,
    size_t width, size_t height, enum cudaMemcpyKind kind, cudaStream_t stream) {
    for (size_t row = 0; row < height; row++)
        copy((char *)target + row * target_pitch, (const char *)source + row * source_pitch, width, kind);
    return cudaSuccess;
}
API cudaError_t cudaMemset(void *address, int value, size_t size) {
    memset(address, value, size);
    return waited();
}
API cudaError_t cudaMemsetAsync(void *address, int value, size_t size, cudaStream_t stream) {
    memset(address, value, size);
    return cudaSuccess;
}

/* The device */

API cudaError_t cudaGetDevice(int *device) {
    *device = 0;
    return cudaSuccess;
}
API cudaError_t cudaGetDeviceCount(int *count) {
    *count = 1;
    return cudaSuccess;
}
API cudaError_t cudaRuntimeGetVersion(int *version) {
    *version = CUDART_VERSION;
    return cudaSuccess;
}
API cudaError_t cudaDriverGetVersion(int *version) { return cudaRuntimeGetVersion(version); }
API cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *found, int device) {
    memset(found, 0, sizeof *found);
    strcpy(found->name, "stand-in");
    found->major = 9;
    found->totalGlobalMem = MEMORY;
    found->multiProcessorCount = 132;
    found->sharedMemPerBlock = 49152;
    found->sharedMemPerBlockOptin = 232448;
    found->sharedMemPerMultiprocessor = 233472;
    found->warpSize = 32;
    found->maxThreadsPerBlock = 1024;
    found->maxThreadsPerMultiProcessor = 2048;
    found->regsPerBlock = found->regsPerMultiprocessor = 65536;
    found->l2CacheSize = 50 << 20;
    found->maxGridSize[0] = 2147483647;
    found->maxGridSize[1] = found->maxGridSize[2] = 65535;
    found->maxThreadsDim[0] = found->maxThreadsDim[1] = 1024;
    found->maxThreadsDim[2] = 64;
    return cudaSuccess;
}
API cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr attribute, int device) {
    switch (attribute) {
    case cudaDevAttrComputeCapabilityMajor: *value = 9; break;
    case cudaDevAttrComputeCapabilityMinor: *value = 0; break;
    case cudaDevAttrMultiProcessorCount: *value = 132; break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = 232448; break;
    case cudaDevAttrWarpSize: *value = 32; break;
    case cudaDevAttrMemoryPoolsSupported: *value = 1; break;
    default: *value = 1024;
    }
    return cudaSuccess;
}

/* Handles: streams, events and pools have no content */

static cudaError_t handle(void **made) {
    *made = malloc(8);
    return cudaSuccess;
}

API cudaError_t cudaStreamCreate(cudaStream_t *stream) { return handle((void **)stream); }
API cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned flags) { return handle((void **)stream); }
API cudaError_t cudaEventCreate(cudaEvent_t *event) { return handle((void **)event); }
API cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned flags) { return handle((void **)event); }
API cudaError_t cudaMemPoolCreate(cudaMemPool_t *pool, const struct cudaMemPoolProps *properties) {
    return handle((void **)pool);
}
API cudaError_t cudaEventElapsedTime(float *milliseconds, cudaEvent_t first, cudaEvent_t last) {
    *milliseconds = 0.01f;
    return cudaSuccess;
}
API cudaError_t cudaStreamSynchronize(cudaStream_t stream) { return waited(); }
API cudaError_t cudaDeviceSynchronize(void) { return waited(); }
API cudaError_t cudaEventSynchronize(cudaEvent_t event) { return waited(); }
API const char *cudaGetErrorString(cudaError_t error) { return "an error of the stand-in"; }
API const char *cudaGetErrorName(cudaError_t error) { return "an error of the stand-in"; }

/* CUDA graphs: a graph is its number */

API cudaError_t cudaStreamBeginCapture(cudaStream_t stream, enum cudaStreamCaptureMode mode) {
    capturing = 1;
    stand_in_captures++;
    return cudaSuccess;
}
API cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t *graph) {
    capturing = 0;
    handle((void **)graph);
    *(int *)*graph = graph_count++;
    return cudaSuccess;
}
API cudaError_t cudaStreamIsCapturing(cudaStream_t stream, enum cudaStreamCaptureStatus *status) {
    *status = capturing ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
    return cudaSuccess;
}
API cudaError_t cudaGraphInstantiate(cudaGraphExec_t *executable, cudaGraph_t graph, unsigned long long flags) {
    handle((void **)executable);
    *(int *)*executable = *(int *)graph;
    return cudaSuccess;
}
API cudaError_t cudaGraphLaunch(cudaGraphExec_t executable, cudaStream_t stream) {
    stand_in_replays++;
    for (size_t number = 0; number < source_count; number++) {
        struct source *source = &sources[number];
        if (source->graph == *(int *)executable)
            stand_in_stale += memcmp(source->address, source->content, source->size) != 0;
    }
    return cudaSuccess;
}
API cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void *argument) {
    function(argument);
    return cudaSuccess;
}

/* Kernels */

API cudaError_t cudaLaunchKernel(const void *kernel, dim3 grid, dim3 block, void **arguments, size_t shared,
    cudaStream_t stream) {
    return launched(kernel);
}
API cudaError_t __cudaLaunchKernel(
    cudaKernel_t kernel, dim3 grid, dim3 block, void **arguments, size_t shared, cudaStream_t stream) {
    return launched(kernel);
}
API cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t *configuration, const void *kernel, void **arguments) {
    return launched(kernel);
}
API unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, void *stream) { return 0; }
API cudaError_t __cudaPopCallConfiguration(dim3 *grid, dim3 *block, size_t *shared, void *stream) {
    *grid = *block = (dim3){1, 1, 1};
    *shared = 0;
    *(void **)stream = NULL;
    return cudaSuccess;
}
API void **__cudaRegisterFatBinary(void *binary) { return malloc(8); }
API void __cudaRegisterFunction(void **binary, const char *function, char *device_function, const char *name, int threads,
    void *thread, void *block, void *block_size, void *grid_size, int *warp_size) {
    if (stand_in_kernel_count % 4096 == 0)
        stand_in_kernels = realloc(stand_in_kernels, (stand_in_kernel_count + 4096) * sizeof *stand_in_kernels);
    stand_in_kernels[stand_in_kernel_count++] = (struct kernel){function, name, 0};
}
API cudaError_t __cudaGetKernel(cudaKernel_t *kernel, const void *function) {
    *kernel = (cudaKernel_t)function;
    return cudaSuccess;
}
API cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes *found, const void *kernel) {
    memset(found, 0, sizeof *found);
    found->maxThreadsPerBlock = 1024;
    found->numRegs = 32;
    return cudaSuccess;
}
API cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(
    int *count, const void *kernel, int block, size_t shared, unsigned flags) {
    *count = 2;
    return cudaSuccess;
}
