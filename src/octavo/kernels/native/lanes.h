// What a kernel that is written once for registers of any width asks of them: eight lanes on every path, and
// sixteen where that is faster. Included inside an anonymous namespace, after the path's simd headers.

#if !defined(OCTAVO_SIXTEEN_LANES)
struct Lanes16;
#endif
struct Lanes8 {
    using Floats = F32x8;
    using Ints = I32x8;
    using Pairs = I16x16;
    static constexpr int kColumns = 8;
    static constexpr int kRegisters = kAccumulators;
    static Floats zeros() { return zero_f32(); }
    static Ints int_zeros() { return zero_i32(); }
    static Floats floats(const float* p) { return load(p); }
    static Ints ints(const int32_t* p) { return load(p); }
    static Floats halves(const Half* p) { return load(p); }
    static Ints bytes(const int8_t* p) { return load(p); }
    static Pairs pairs(const int8_t* p) { return load_pairs(p); }
    static Pairs splat_pair(const int16_t* p) { return broadcast_pair(p); }
    static Floats splat(float x) { return broadcast(x); }
    static Ints splat(int32_t x) { return broadcast(x); }
};

#if defined(OCTAVO_SIXTEEN_LANES)
using Wide = Lanes16;
#else
using Wide = Lanes8;
#endif
