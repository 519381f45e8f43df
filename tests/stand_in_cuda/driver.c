/* An NVIDIA driver without a GPU: device memory is host memory, as in runtime.c. */

#include <cuda.h>
#include <string.h>

#define API __attribute__((visibility("default")))

API CUresult cuInit(unsigned flags) { return CUDA_SUCCESS; }
API CUresult cuDriverGetVersion(int *version) {
    *version = CUDA_VERSION;
    return CUDA_SUCCESS;
}
API CUresult cuDeviceGetCount(int *count) {
    *count = 1;
    return CUDA_SUCCESS;
}
API CUresult cuDeviceGet(CUdevice *device, int number) {
    *device = 0;
    return CUDA_SUCCESS;
}
API CUresult cuDeviceGetName(char *name, int room, CUdevice device) {
    strncpy(name, "stand-in", room);
    return CUDA_SUCCESS;
}
API CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice device) {
    *value = attribute == CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR ? 9 : 0;
    return CUDA_SUCCESS;
}
API CUresult cuDeviceTotalMem(size_t *bytes, CUdevice device) {
    *bytes = 80ul << 30;
    return CUDA_SUCCESS;
}
API CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) {
    *context = NULL;
    return CUDA_SUCCESS;
}
API CUresult cuDevicePrimaryCtxRelease(CUdevice device) { return CUDA_SUCCESS; }
API CUresult cuCtxPushCurrent(CUcontext context) { return CUDA_SUCCESS; }
API CUresult cuCtxPopCurrent(CUcontext *context) { return CUDA_SUCCESS; }
API CUresult cuCtxSynchronize(void) { return CUDA_SUCCESS; }
API CUresult cuMemsetD8(CUdeviceptr address, unsigned char value, size_t size) {
    memset((void *)address, value, size);
    return CUDA_SUCCESS;
}
API CUresult cuMemcpyDtoD(CUdeviceptr target, CUdeviceptr source, size_t size) {
    memmove((void *)target, (void *)source, size);
    return CUDA_SUCCESS;
}
API CUresult cuMemcpy3D(const CUDA_MEMCPY3D *copy) {
    const char *source = copy->srcMemoryType == CU_MEMORYTYPE_HOST ? copy->srcHost : (void *)copy->srcDevice;
    char *target = copy->dstMemoryType == CU_MEMORYTYPE_HOST ? copy->dstHost : (void *)copy->dstDevice;
    for (size_t plane = 0; plane < copy->Depth; plane++)
        for (size_t row = 0; row < copy->Height; row++)
            memmove(target + (plane * copy->dstHeight + row) * copy->dstPitch,
                source + (plane * copy->srcHeight + row) * copy->srcPitch, copy->WidthInBytes);
    return CUDA_SUCCESS;
}
API CUresult cuTensorMapEncodeTiled(CUtensorMap *map, CUtensorMapDataType type, cuuint32_t rank, void *address,
    const cuuint64_t *sizes, const cuuint64_t *strides, const cuuint32_t *box, const cuuint32_t *steps,
    CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle, CUtensorMapL2promotion promotion,
    CUtensorMapFloatOOBfill fill) {
    return CUDA_SUCCESS;
}
