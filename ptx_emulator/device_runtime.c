/* Stands in for the CUDA runtime in front of one compiled object: a launch goes to a callback instead of a GPU.
 *
 * Built with the object into one shared library, so each kernel has its own copy of this state. */

#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

typedef struct {
    uint32_t grid[3], block[3];
    size_t dynamic_shared;
    void *stream;
    const void *attributes;
    uint32_t attribute_count;
} LaunchConfig;

typedef int (*LaunchCallback)(const char *kernel, const LaunchConfig *config, void **arguments);
typedef void (*RaiseParts)(const char *kind, const char **parts, int32_t count);

static LaunchCallback launch;
static int shared_limit, static_shared, current_device;
static void *library;

void ptx_emulator_connect(LaunchCallback callback, int limit, int static_bytes) {
    launch = callback;
    shared_limit = limit;
    static_shared = static_bytes;
}

int cuda_dialect_init_library_once(void **state, int (*init)(void **), int (*load)(void **, int), void *raise) {
    (void)raise;
    if (library == NULL) {
        int code = init(&library);
        if (code == 0) code = load(&library, 0);
        if (code != 0) {
            library = NULL;
            return code;
        }
        *state = library;
    }
    return 0;
}

void cuda_dialect_unload_library_once(void **state) { (void)state; }

int _cudaLibraryLoadData(void **out, const void *code) {
    *out = (void *)code;
    return 0;
}

int _cudaLibraryGetKernel(void **out, void *from, const char *name) {
    (void)from;
    *out = strdup(name); /* the handle of a kernel is its name; kernels live as long as the process */
    return 0;
}

int _cudaGetDevice(int *device) {
    *device = current_device;
    return 0;
}

int _cudaSetDevice(int device) {
    current_device = device;
    return 0;
}

int _cudaDeviceGetAttribute(int *value, int attribute, int device) {
    (void)device;
    if (attribute != 97) return 1; /* cudaDevAttrMaxSharedMemoryPerBlockOptin is all that objects ask for */
    *value = shared_limit;
    return 0;
}

int _cuKernelGetAttribute(int *value, int attribute, void *kernel, int device) {
    (void)kernel, (void)device;
    if (attribute != 1) return 1; /* CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES */
    *value = static_shared;
    return 0;
}

int _cudaFuncSetAttribute(void *kernel, int attribute, int value) {
    (void)kernel, (void)attribute, (void)value;
    return 0;
}

int _cudaKernelSetAttributeForDevice(void *kernel, int attribute, int value, int device) {
    (void)kernel, (void)attribute, (void)value, (void)device;
    return 0;
}

int _cudaLaunchKernelEx(const LaunchConfig *config, void *kernel, void **arguments) {
    return launch == NULL ? 3 : launch((const char *)kernel, config, arguments);
}

void CuteDSLRT_TVMFFISetRaisedCudaError(RaiseParts raise, int code) {
    (void)code;
    const char *parts[] = {"the emulated device refused the call"};
    raise("RuntimeError", parts, 1);
}

/* A DLPack tensor on device cuda:0 over memory of the caller, who keeps it alive. The deleter is C: one in Python would run
 * after the interpreter has gone. */

typedef struct {
    void *data;
    int32_t device_type, device_id;
    int32_t dimensions;
    uint8_t code, bits;
    uint16_t lanes;
    int64_t *shape, *strides;
    uint64_t byte_offset;
} Tensor;

typedef struct Managed {
    Tensor tensor;
    void *context;
    void (*deleter)(struct Managed *);
} Managed;

static void delete_tensor(Managed *tensor) {
    free(tensor->tensor.shape);
    free(tensor);
}

void *ptx_emulator_tensor(void *data, int dimensions, const int64_t *shape, const int64_t *strides, int code, int bits) {
    Managed *m = calloc(1, sizeof(Managed));
    int64_t *sizes = malloc(sizeof(int64_t) * 2 * (dimensions + 1));
    if (m == NULL || sizes == NULL) abort();
    memcpy(sizes, shape, sizeof(int64_t) * dimensions);
    memcpy(sizes + dimensions, strides, sizeof(int64_t) * dimensions);
    m->tensor = (Tensor){data, 2, 0, dimensions, (uint8_t)code, (uint8_t)bits, 1, sizes, sizes + dimensions, 0};
    m->deleter = delete_tensor;
    return m;
}
