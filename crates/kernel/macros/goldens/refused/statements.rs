#[device]
fn f(x: u32, out: &mut Buffer<f32>) -> u32 {
    match x {
        0 => 1,
        _ => 2,
    };
    if let 3 = x {}
    while let 3 = x {}
    let Some(y) = x else { return 1 };
    let (a, b) = (x, x);
    let [c, d] = [x, x];
    let Pair { e, f } = x;
    let ref g = x;
    let h @ 1 = x;
    let late;
    let late: u32;
    let n = 0;
    let m = -1;
    let k = if x > 3 { 0 } else { 1 };
    let j = if x > 3 {
        let t = x;
        t
    } else {
        x
    };
    let i = {
        let t = x;
        t + 1
    };
    let l = out;
    let _ = x;
    'outer: loop {
        break 'outer;
    }
    'outer: while x > 3 {
        continue 'outer;
    }
    loop {
        break 3;
    }
    fn nested() {}
    const INNER: u32 = 3;
    static TABLE: [u32; 2] = [1, 2];
    use std::mem;
    struct Local;
    println!("{x}");
    assert!(x > 3);
    debug_assert_eq!(x, 3);
    panic!("no");
    vec![1, 2];
    mine!(x);
    unsafe { x };
    x + 1;
    x;
    #[cfg(test)]
    let p = x;
    #[unroll]
    let q = x;
    #[unroll]
    while x > 3 {}
    #[inline]
    for i in 0..x {}
    #[cfg(test)]
    barrier();
    #[unroll]
    barrier();
    if x > 3 {
        #[cfg(test)]
        return 3;
    }
    #[unroll(4)]
    for i in 0..x {}
    const { x };
    const {
        let y = 3;
        assert!(x > 3);
        assert!(true, "{}", 3);
    }
    x = Pair { a: 1, b: 2 };
    out = out;
    (a, b) = (b, a);
    f = x;
    x = y = 3;
    if x > 3 { 1 } else if x > 2 { 2 }
}
