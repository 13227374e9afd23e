#[device]
fn f(x: u32, y: f32, a: [f32; 4], out: &mut Buffer<f32>, counts: &mut Buffer<u32>, flag: &mut u32) -> u32 {
    let b = f(x);
    let c = x(3);
    let d = (a[0])(3);
    let e = a.iter();
    let g = a.len();
    let h = a.map(|x| x + 1.0);
    let i = a.clone();
    let j = y.round();
    let k = y.powi(2);
    let l = x.checked_add(3);
    let m = x.into();
    let n = y.foo(3);
    let o = y.max::<f32>(3.0);
    let p = out.len();
    let q = out.load(3);
    let r = out.load_as::<u32>(3);
    let s = out.foo(3);
    let t = next(flag) + a[0];
    let u = *flag + atomic_add(counts, 0, 1);
    let v = [next(flag), next(flag)];
    let w = next(next(flag));
    let z = a[1] + if x > 3 { next(flag) } else { x };
    out[next(flag)] = 1.0;
    out[0] = next(flag);
    *flag += next(flag);
    for i in 0..next(flag) {}
    let aa = select(y > 0.0, 0, 1);
    let ab = simd_sum(1);
    let ac = simd_sum::<u32>(x);
    let ad = atomic_add(x, 0, 1);
    let ae = next(&x);
    let af = next(&mut a[1]);
    let ag = next(&a[1]);
    let ah = next(_);
    let ai = generic::<_, 4>(x);
    let aj = generic::<'static>(x);
    let ak = Some(x);
    let al = Pair::new(x);
    let am = f32::max(y, 1.0);
    let an = u32::from_f32(y).foo();
    let ao = Fragment::zero();
    let ap = Fragment::<f32>::ones();
    let aq = Pair { a: 1.0, b: 2 }.sum();
    let ar = next(Pair { a: 1.0, b: 2 });
    let at: Shared<f32> = shared(3);
    let au = next(shared(3));
    let av = next(|x| x);
    let aw = next((x, x));
    x
}

#[kernel(threads = 32)]
fn k(x: &mut Buffer<f32>, n: u32) {
    let mut a = shared(32);
    let mut b: [f32; 4] = shared(4);
    let mut c: Shared<f32> = shared(n as usize);
    let mut d: Shared<f32> = shared(4, 5);
    if n > 3 {
        let mut e: Shared<f32> = shared(4);
    }
    let mut g: Shared<Pair> = shared(4);
    let h = k(x, n);
    return 3;
}

#[device]
fn of_std(x: f32) -> f32 {
    std::cmp::max(x as u32, 1) as f32 * std::f32::consts::PI + f32::sqrt(x)
}
