// Barriers in shared memory: a phase ends after `count` arrivals, and the copies of the n bytes that each announces
DEVICE void init(u32 bar, int count) { PTX("mbarrier.init.shared::cta.b64 [%0], %1;" :: "r"(bar), "r"(count)); }
DEVICE void arrive(u32 b, int n) { PTX("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" :: "r"(b), "r"(n)); }
DEVICE void wait(u32 bar, int parity) {
  PTX("{.reg .pred p;\nL: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n@p bra D;\nbra L;\nD:}"
      :: "r"(bar), "r"(parity));
}
// sums (+)= w @ x of a warpgroup: 64 x 16 numbers w, and x as a descriptor tells it, which may be stored transposed.
// SUMS, WGMMA: see cuda_source.wgmma
template <bool TRANSPOSED = false, int COUNT>
DEVICE void wgmma(float (&sums)[COUNT], const u32 (&w)[4], u64 x, int adds) {
  PTX("{.reg .pred p; " WGMMA "}" : SUMS : "r"(w[0]), "r"(w[1]), "r"(w[2]), "r"(w[3]), "l"(x), "r"(adds),
      "n"((int)TRANSPOSED));
}
