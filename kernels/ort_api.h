// The part of ONNX Runtime's C API that custom operators need.
//
// No wheel contains the headers. The ABI is stable: OrtApi is a table of functions whose order never changes, and
// OrtCustomOp a struct that begins with its version. Version 18 (ONNX Runtime 1.18) is the first with GetMayInplace;
// a newer version would be refused by an older runtime.
#pragma once
#include <cstddef>
#include <cstdint>
#include <cstring>

struct OrtStatus;
struct OrtValue;
struct OrtKernelInfo;
struct OrtKernelContext;
struct OrtSessionOptions;
struct OrtCustomOpDomain;
struct OrtTensorTypeAndShapeInfo;

struct OrtApiBase {
  const void* const* (*GetApi)(uint32_t version);  // null: the runtime is older
};

enum OrtType { ORT_FLOAT = 1, ORT_UINT8 = 2, ORT_INT8 = 3, ORT_INT64 = 7, ORT_BOOL = 9 };
enum OrtCharacteristic { ORT_REQUIRED = 0, ORT_OPTIONAL = 1 };
enum OrtErrorCode { ORT_FAIL = 1, ORT_INVALID_ARGUMENT = 2 };

constexpr uint32_t ORT_VERSION = 18;

struct OrtCustomOp {
  uint32_t version;
  void* (*CreateKernel)(const OrtCustomOp*, const void* api, const OrtKernelInfo*);
  const char* (*GetName)(const OrtCustomOp*);
  const char* (*GetExecutionProviderType)(const OrtCustomOp*);
  OrtType (*GetInputType)(const OrtCustomOp*, size_t);
  size_t (*GetInputTypeCount)(const OrtCustomOp*);
  OrtType (*GetOutputType)(const OrtCustomOp*, size_t);
  size_t (*GetOutputTypeCount)(const OrtCustomOp*);
  void (*KernelCompute)(void* kernel, OrtKernelContext*);
  void (*KernelDestroy)(void* kernel);
  OrtCharacteristic (*GetInputCharacteristic)(const OrtCustomOp*, size_t);
  OrtCharacteristic (*GetOutputCharacteristic)(const OrtCustomOp*, size_t);
  int (*GetInputMemoryType)(const OrtCustomOp*, size_t);
  int (*GetVariadicInputMinArity)(const OrtCustomOp*);
  int (*GetVariadicInputHomogeneity)(const OrtCustomOp*);
  int (*GetVariadicOutputMinArity)(const OrtCustomOp*);
  int (*GetVariadicOutputHomogeneity)(const OrtCustomOp*);
  OrtStatus* (*CreateKernelV2)(const OrtCustomOp*, const void* api, const OrtKernelInfo*, void** kernel);
  OrtStatus* (*KernelComputeV2)(void* kernel, OrtKernelContext*);
  OrtStatus* (*InferOutputShapeFn)(const OrtCustomOp*, void* context);
  int (*GetStartVersion)(const OrtCustomOp*);
  int (*GetEndVersion)(const OrtCustomOp*);
  size_t (*GetMayInplace)(int** inputs, int** outputs);
  void (*ReleaseMayInplace)(int* inputs, int* outputs);
  size_t (*GetAliasMap)(int** inputs, int** outputs);
  void (*ReleaseAliasMap)(int* inputs, int* outputs);
};

// The functions in use. Those that return a status return null for success.
struct OrtFunctions {
  OrtStatus* (*CreateStatus)(OrtErrorCode, const char* message);
  void (*ReleaseStatus)(OrtStatus*);
  OrtStatus* (*CreateCustomOpDomain)(const char* name, OrtCustomOpDomain**);
  OrtStatus* (*CustomOpDomain_Add)(OrtCustomOpDomain*, const OrtCustomOp*);
  OrtStatus* (*AddCustomOpDomain)(OrtSessionOptions*, OrtCustomOpDomain*);
  OrtStatus* (*GetTensorMutableData)(OrtValue*, void**);
  OrtStatus* (*GetTensorElementType)(const OrtTensorTypeAndShapeInfo*, OrtType*);
  OrtStatus* (*GetDimensionsCount)(const OrtTensorTypeAndShapeInfo*, size_t*);
  OrtStatus* (*GetDimensions)(const OrtTensorTypeAndShapeInfo*, int64_t*, size_t count);
  OrtStatus* (*GetTensorTypeAndShape)(const OrtValue*, OrtTensorTypeAndShapeInfo**);
  void (*ReleaseTensorTypeAndShapeInfo)(OrtTensorTypeAndShapeInfo*);
  OrtStatus* (*KernelInfoGetAttribute_float)(const OrtKernelInfo*, const char* name, float*);
  OrtStatus* (*KernelInfoGetAttribute_int64)(const OrtKernelInfo*, const char* name, int64_t*);
  OrtStatus* (*KernelInfoGetAttribute_string)(const OrtKernelInfo*, const char* name, char*, size_t* size);
  OrtStatus* (*KernelInfoGetAttributeArray_int64)(const OrtKernelInfo*, const char* name, int64_t*, size_t* count);
  OrtStatus* (*KernelInfo_GetNodeName)(const OrtKernelInfo*, char*, size_t* size);
  OrtStatus* (*KernelInfo_GetInputCount)(const OrtKernelInfo*, size_t*);
  OrtStatus* (*KernelInfoGetConstantInput_tensor)(const OrtKernelInfo*, size_t, int* is_constant, const OrtValue**);
  OrtStatus* (*KernelContext_GetInput)(const OrtKernelContext*, size_t, const OrtValue**);
  OrtStatus* (*KernelContext_GetOutput)(OrtKernelContext*, size_t, const int64_t* dims, size_t rank, OrtValue**);
  OrtStatus* (*KernelContext_ParallelFor)(const OrtKernelContext*, void (*)(void*, size_t), size_t total,
                                          size_t batches, void*);

  explicit OrtFunctions(const void* const* table) {
    auto read = [&](auto& function, int index) { memcpy(&function, &table[index], sizeof function); };
    read(CreateStatus, 0);
    read(CreateCustomOpDomain, 26);
    read(CustomOpDomain_Add, 27);
    read(AddCustomOpDomain, 28);
    read(GetTensorMutableData, 51);
    read(GetTensorElementType, 60);
    read(GetDimensionsCount, 61);
    read(GetDimensions, 62);
    read(GetTensorTypeAndShape, 65);
    read(KernelInfoGetAttribute_float, 85);
    read(KernelInfoGetAttribute_int64, 86);
    read(KernelInfoGetAttribute_string, 87);
    read(KernelContext_GetInput, 90);
    read(KernelContext_GetOutput, 91);
    read(ReleaseStatus, 93);
    read(ReleaseTensorTypeAndShapeInfo, 99);
    read(KernelInfoGetAttributeArray_int64, 163);
    read(KernelInfo_GetInputCount, 230);
    read(KernelInfo_GetNodeName, 244);
    read(KernelInfoGetConstantInput_tensor, 249);
    read(KernelContext_ParallelFor, 274);
  }
};
