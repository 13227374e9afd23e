// tanh, for softcaps.

// From this magnitude on the exponential form of tanh keeps its digits.
constexpr float TANH_FAR = 0.55f;

// tanh(a) of a magnitude below TANH_FAR: a (1 + a^2 f(a^2)), where f is a least-squares fit at Chebyshev points; relative error 1e-7.
DEVICE float tanh_near(float a) {
    const float a2 = a * a;
    const float fit = fmaf(a2, fmaf(a2, fmaf(a2, fmaf(a2, -3.92890302e-3f, 1.94836594e-2f), -5.34950122e-2f), 1.33296296e-1f), -3.33332539e-1f);
    return fmaf(a, a2 * fit, a);
}

// tanh with an error of two units in the last place.
DEVICE float tanh_accurate(float x) {
    const float a = fabsf(x), far = 1.f - 2.f / (1.f + exp2f(2.f * LOG2E * a));
    return copysignf(a < TANH_FAR ? tanh_near(a) : far, x);
}
