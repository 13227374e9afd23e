/// A value and where it stands.
#[device]
struct Best<T: Element, const N: usize> {
    value: [T; N],
    /// The index.
    index: u32,
    signed: bool,
}

#[device]
struct Nested {
    inner: Pair,
    weight: f32,
}

#[device]
fn make<T: Element, const N: usize>(value: [T; N], index: u32) -> Best<T, N> {
    Best { index, value, signed: index > 3 }
}

#[device]
fn update(index: u32, other: Best<f32, 4>) -> Nested {
    let mut best: Best<f32, 4> = Best { index: 0, value: [0.0; 4], signed: false };
    let again = Best::<f16, 8> { index, value: [f16::from_f32(1.0); 8], signed: true };
    if other.value[0] > best.value[0] {
        best = other;
    }
    best.index += again.index;
    let pair = geometry::Pair { a: best.value[0], b: best.index };
    let pair = Pair { a: pair.a, b: if pair.b > 3 { let t = pair.b; t * 2 } else { 0 } };
    if pair.b == 7 {
        return Nested { inner: pair, weight: 0.5 };
    }
    Nested { inner: Pair { a: 1.0, b: 2 }, weight: pair.a }
}

/// Buffers that are passed together.
#[device]
struct Rows<'a, T: Element> {
    /// Row after row.
    elements: &'a Buffer<T>,
    table: &'a Buffer<u32>,
    stride: u32,
}

#[device]
fn element_of<T: Element>(rows: Rows<T>, index: u32) -> f32 {
    rows.elements[rows.table[index] * rows.stride].to_f32() + at(rows.elements, index)
}

#[device]
fn first_of<T: Element>(elements: &Buffer<T>, table: &Buffer<u32>) -> f32 {
    let rows = Rows::<T> { elements, table, stride: 2 };
    let two = rows.elements.load::<2>(4);
    two[1].to_f32() + element_of(rows, 0)
}

#[device]
struct Both<'a> {
    rows: Rows<'a, f32>,
    two: [Rows<'a, f16>; 2],
    first: u32,
}
