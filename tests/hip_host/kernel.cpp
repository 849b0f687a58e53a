// One specialised kernel as the harness calls it. SIMT_SOURCE is its file, SIMT_KERNEL its name.
#include SIMT_SOURCE

struct Pointer {
    void* address;
    template <class T>
    operator T*() const {
        return static_cast<T*>(address);
    }
};

extern const char* const simt_name = SIMT_SOURCE;
extern const int simt_wave = PF_WAVE;
extern const int simt_call_bytes = sizeof(Call);
#if defined(__gfx90a__)
extern const bool simt_flushes = true;
#else
extern const bool simt_flushes = false;
#endif

void simt_kernel(void* const* p, const void* call) {
    const auto pointer = [p](int i) { return Pointer{p[i]}; };
    SIMT_KERNEL(pointer(0), pointer(1), pointer(2), pointer(3), pointer(4), pointer(5), pointer(6), pointer(7), pointer(8),
                pointer(9), pointer(10), pointer(11), pointer(12), pointer(13), pointer(14), pointer(15), pointer(16),
                pointer(17), *static_cast<const Call*>(call));
}
