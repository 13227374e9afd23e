#[device]
fn f(x: u32, y: f32, a: [f32; 4], out: &mut Buffer<f32>, flag: &mut u32) -> u32 {
    let b = (x, x);
    let c = a.0;
    let d = |x| x + 1;
    let e = &a[1];
    let g = &a;
    let h = &mut x;
    let i = *x;
    let j = a[1..2];
    let k = 1..2;
    let l = "text";
    let m = b"text";
    let n = 'c';
    let o = x?;
    let p = async { x };
    let q = x.await;
    let r = match x {
        _ => 1,
    };
    let s = [];
    let t = ();
    let u = [0; 4];
    let v = [0, 1, 2];
    let w = [[0; 2]; 2];
    let z = 1 + 2;
    let aa = 1 << x;
    let ab = 1 < 2;
    let ac = 1.max(x);
    let ad = !0;
    let af = x as f64;
    let ag = x as isize;
    let ah = x as T;
    let ai = x as f16;
    let aj = Pair { a: x, b: x }.a;
    let ak = Pair { a: x, ..other };
    let al = if x > 3 {
        let t = x;
        t
    } else {
        x
    } + 1;
    let am = x + { let t = x; t };
    let an = u32::from(x);
    let ao = f32::EPSILON + f32::DIGITS + u32::MIN;
    let ap = Self::SIZE;
    let aq = <T as Sized>::SIZE;
    let ar = Geometry::SIZE;
    let at = generic::<u32>;
    let au = x = 3;
    let av = loop {};
    let aw = return 3;
    let ax = const { 3 };
    let ay = vec![x];
    let az = out;
    1 as u128;
    x
}
