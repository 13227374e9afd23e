//! Memory as arrays and capsules describe it, checked: plain data, which needs no interpreter.

use flashtile::Dtype;
use flashtile::tensor::check_disjoint;
use std::ops::Range;

/// More axes than any array has: numpy stops at 64.
pub(crate) const MAX_RANK: usize = 64;

/// Type of elements.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    Element(Dtype),
    Bool,
}

impl Kind {
    pub(crate) const fn bytes(self) -> usize {
        match self {
            Self::Element(dtype) => dtype.bytes(),
            Self::Bool => 1,
        }
    }
}

/// Why memory cannot be used, by the exception of Python that says so.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Refusal {
    /// `BufferError`.
    Buffer(String),
    /// `TypeError`.
    Type(String),
    /// `ValueError`.
    Value(String),
}

/// Order of the axes of a tensor of Python.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Axes {
    /// `(batch, heads, seq, dim)`.
    Bhsd,
    /// `(batch, seq, heads, dim)`.
    Bshd,
    /// `(total, heads, dim)`.
    Packed,
}

impl Axes {
    pub(crate) const fn names(self) -> &'static str {
        match self {
            Self::Bhsd => "(batch, heads, seq, dim)",
            Self::Bshd => "(batch, seq, heads, dim)",
            Self::Packed => "(total, heads, dim)",
        }
    }

    /// Sizes or strides in the order `[batch, heads, rows, dim]`. `batch` stands for a missing axis.
    fn logical(self, of: &[usize], batch: usize) -> Option<[usize; 4]> {
        match (self, of) {
            (Self::Bhsd, &[b, h, s, d]) | (Self::Bshd, &[b, s, h, d]) => Some([b, h, s, d]),
            (Self::Packed, &[s, h, d]) => Some([batch, h, s, d]),
            (Self::Bhsd | Self::Bshd | Self::Packed, _) => None,
        }
    }
}

/// Memory as its owner describes it.
#[derive(Debug)]
pub(crate) struct Described {
    /// The first element.
    pub(crate) ptr: *mut u8,
    pub(crate) kind: Kind,
    pub(crate) shape: Vec<usize>,
    /// In elements; `None` is dense.
    pub(crate) strides: Option<Vec<isize>>,
    pub(crate) readonly: bool,
}

/// `__array_interface__` of an array.
#[derive(Debug)]
pub(crate) struct ArrayInterface<'a> {
    pub(crate) address: usize,
    pub(crate) readonly: bool,
    pub(crate) shape: Vec<usize>,
    /// In bytes; `None` is dense.
    pub(crate) strides: Option<Vec<isize>>,
    pub(crate) typestr: &'a str,
    /// Name of the array's dtype, where it has one: extension types of numpy are bytes to the protocol.
    pub(crate) dtype: Option<&'a str>,
}

impl ArrayInterface<'_> {
    pub(crate) fn described(self, name: &str) -> Result<Described, Refusal> {
        let (kind, shape) = (self.kind(name)?, self.shape);
        let bytes = kind.bytes() as isize;
        if let Some(strides) = &self.strides {
            if strides.len() != shape.len() {
                return Err(Refusal::Buffer(format!("{name} has strides {strides:?} of shape {shape:?}")));
            }
            if strides.iter().zip(&shape).any(|(stride, n)| *n > 1 && stride % bytes != 0) {
                let what =
                    format!("{name} has strides {strides:?}, which are no multiples of its {bytes} bytes");
                return Err(Refusal::Buffer(what));
            }
        }
        let strides = self.strides.map(|strides| strides.into_iter().map(|stride| stride / bytes).collect());
        let ptr = std::ptr::with_exposed_provenance_mut(self.address);
        Ok(Described { ptr, kind, shape, strides, readonly: self.readonly })
    }

    fn kind(&self, name: &str) -> Result<Kind, Refusal> {
        const NATIVE: char = if cfg!(target_endian = "big") { '>' } else { '<' };
        let mut code = self.typestr.chars();
        let order = code.next();
        let native = matches!(order, Some(order) if order == NATIVE || order == '|');
        match code.as_str() {
            "f4" if native => Ok(Kind::Element(Dtype::F32)),
            "f2" if native => Ok(Kind::Element(Dtype::F16)),
            "b1" => Ok(Kind::Bool),
            "V2" if native && self.dtype == Some("bfloat16") => Ok(Kind::Element(Dtype::BF16)),
            _ => Err(wrong_dtype(name, self.dtype.unwrap_or(self.typestr))),
        }
    }
}

pub(crate) fn wrong_dtype(name: &str, got: &str) -> Refusal {
    let expected =
        if name == "mask" { "bool, float32, float16 or bfloat16" } else { "float32, float16 or bfloat16" };
    let remedy = match got.starts_with("float8") {
        true => {
            ": convert it by .to(torch.bfloat16) or .astype(ml_dtypes.bfloat16), which is exact, and multiply the option scale by the \
             scale of the keys and the result by that of the values. KvCache(k=\"fp8\", v=\"fp8\") stores rows of 8 bits with a scale each"
        }
        false => "",
    };
    Refusal::Type(format!("{name} is {got}, expected {expected}{remedy}"))
}

/// Memory of an argument, which can be addressed.
///
/// Invariant: elements that `shape` reaches from `ptr` with `strides` have addresses that neither are null nor overflow. That they lie in
/// one allocation is the promise of whoever described them.
#[derive(Debug)]
pub(crate) struct Block {
    pub(crate) name: &'static str,
    pub(super) ptr: *mut u8,
    pub(super) kind: Kind,
    pub(super) shape: Vec<usize>,
    /// 0 of axes with fewer than two elements, and of memory without elements.
    pub(super) strides: Vec<usize>,
    readonly: bool,
}

impl Block {
    /// The memory of an argument with this name. `available` are bytes from the first element on, where they are known.
    ///
    /// # Errors
    /// [`Refusal::Buffer`] where strides are negative or of another rank, or the elements reach further than addresses or `available` do,
    /// or have no address.
    pub(crate) fn new(
        name: &'static str,
        described: Described,
        available: Option<usize>,
    ) -> Result<Self, Refusal> {
        let Described { ptr, kind, shape, strides, readonly } = described;
        let strides = checked_strides(name, &shape, strides)?;
        let block = Self { name, ptr, kind, shape, strides, readonly };
        let bytes = block.checked_span()? * kind.bytes();
        if bytes > 0 && ptr.is_null() {
            let what = format!(
                "{name} has shape {:?} and no memory, as a tensor has whose storage was freed",
                block.shape
            );
            return Err(Refusal::Buffer(what));
        }
        if let Some(available) = available.filter(|available| bytes > *available) {
            let what = format!("{name} takes {bytes} bytes, and its storage has {available}: it was resized");
            return Err(Refusal::Buffer(what));
        }
        Ok(block)
    }

    /// Elements from the first to one past the last that the shape reaches, where all have addresses.
    fn checked_span(&self) -> Result<usize, Refusal> {
        if self.shape.contains(&0) {
            return Ok(0);
        }
        let last = self
            .shape
            .iter()
            .zip(&self.strides)
            .try_fold(0usize, |last, (n, stride)| last.checked_add((n - 1).checked_mul(*stride)?));
        let count = last.and_then(|last| last.checked_add(1));
        let fits = |count: &usize| {
            let bytes = count.checked_mul(self.kind.bytes()).filter(|&bytes| isize::try_from(bytes).is_ok());
            bytes.is_some_and(|bytes| (self.ptr as usize).checked_add(bytes).is_some())
        };
        let overflow = || Refusal::Buffer(format!("{}: shape times strides is not addressable", self.name));
        count.filter(fits).ok_or_else(overflow)
    }

    /// Elements from the first to one past the last that the shape reaches.
    pub(crate) fn span(&self) -> usize {
        match self.shape.contains(&0) {
            true => 0,
            false => {
                1 + self.shape.iter().zip(&self.strides).map(|(n, stride)| (n - 1) * stride).sum::<usize>()
            }
        }
    }

    /// Dtype, shape and strides in the order `[batch, heads, rows, dim]`.
    pub(super) fn logical(&self, axes: Axes) -> Result<(Dtype, [usize; 4], [usize; 4]), Refusal> {
        let (name, shape) = (self.name, &self.shape);
        let Kind::Element(dtype) = self.kind else {
            return Err(wrong_dtype(name, "bool"));
        };
        let (Some(sizes), Some(strides)) = (axes.logical(shape, 1), axes.logical(&self.strides, 0)) else {
            let what = format!("{name} has shape {shape:?}, expected {}", axes.names());
            return Err(Refusal::Value(what));
        };
        if sizes[3] > 1 && strides[3] != 1 && !sizes.contains(&0) {
            let what = format!(
                "{name} has strides {:?}, expected 1 for the last axis: copy it, as numpy.ascontiguousarray or .contiguous() does",
                self.strides
            );
            return Err(Refusal::Buffer(what));
        }
        // The axis may have one element, whose stride says nothing.
        let [b, h, s, _] = strides;
        Ok((dtype, sizes, [b, h, s, 1]))
    }

    /// Shape and strides of a mask `[batch, heads, queries, keys]`, of one axis, two or four.
    pub(super) fn mask_axes(&self) -> Result<([usize; 4], [usize; 4]), Refusal> {
        let four = |of: &[usize], missing| match *of {
            [k] => Some([missing, missing, missing, k]),
            [q, k] => Some([missing, missing, q, k]),
            [b, h, q, k] => Some([b, h, q, k]),
            _ => None,
        };
        let name = self.name;
        let (Some(shape), Some(strides)) = (four(&self.shape, 1), four(&self.strides, 0)) else {
            let what = format!(
                "{name} has shape {:?}, expected (keys,), (queries, keys) or (batch, heads, queries, keys)",
                self.shape
            );
            return Err(Refusal::Value(what));
        };
        if strides[3] > 1 {
            let what = format!("{name} has strides {strides:?}, expected 0 or 1 for the last axis: copy it");
            return Err(Refusal::Buffer(what));
        }
        Ok((shape, strides))
    }

    /// Sizes of the axes.
    pub(crate) fn shape(&self) -> &[usize] {
        &self.shape
    }

    /// Joins batch and rows to one axis: `(total, heads, dim)`, the batch entries one after another.
    pub(crate) fn join_batch(&mut self, axes: Axes) -> Result<(), Refusal> {
        let (name, shape) = (self.name, &self.shape);
        let (Some([b, h, s, d]), Some([sb, sh, ss, sd])) =
            (axes.logical(shape, 1), axes.logical(&self.strides, 0))
        else {
            return Err(Refusal::Value(format!("{name} has shape {shape:?}, expected {}", axes.names())));
        };
        let row = match (b, s) {
            (_, 0 | 1) => sb,
            (0 | 1, _) => ss,
            _ if ss.checked_mul(s) == Some(sb) => ss,
            _ => {
                let what = format!(
                    "{name} has shape {shape:?} and strides {:?}: a batch entry has to begin where the entry before it ends, \
                     as in a dense (batch, seq, heads, dim) with layout='bshd', or in (total, heads, dim)",
                    self.strides
                );
                return Err(Refusal::Buffer(what));
            }
        };
        // Elements have addresses, so that rows are countable, unless there are none.
        (self.shape, self.strides) = (vec![b.saturating_mul(s), h, d], vec![row, sh, sd]);
        Ok(())
    }

    /// Refuses memory of another shape, or whose elements do not follow one another in the order of the axes.
    pub(super) fn check_order(&self, shape: &[usize]) -> Result<(), Refusal> {
        let (name, got) = (self.name, &self.shape);
        if got != shape {
            return Err(Refusal::Value(format!("{name} has shape {got:?}, expected {shape:?}")));
        }
        let mut step = 1;
        for (&n, &stride) in shape.iter().zip(&self.strides).rev() {
            if n > 1 && stride != step && !shape.contains(&0) {
                let what = format!("{name} has strides {:?}, expected a dense array: copy it", self.strides);
                return Err(Refusal::Buffer(what));
            }
            step *= n;
        }
        Ok(())
    }

    /// Refuses all but dense memory of f32, and counts its elements.
    pub(super) fn check_list(&self) -> Result<usize, Refusal> {
        // A dense shape has no more elements than the span, which fits.
        let count = self.shape.iter().try_fold(1usize, |count, n| count.checked_mul(*n));
        let aligned = (self.ptr as usize).is_multiple_of(size_of::<f32>());
        match count {
            Some(count) if self.kind == Kind::Element(Dtype::F32) && self.span() == count && aligned => {
                Ok(count)
            }
            _ => Err(Refusal::Buffer(format!("{} is not a dense array of float32", self.name))),
        }
    }

    /// Addresses of the elements.
    pub(crate) fn addresses(&self) -> Range<usize> {
        let start = self.ptr as usize;
        start..start + self.span() * self.kind.bytes()
    }

    /// Refuses memory that may not be written, or that lies between the first and the last element of another argument.
    pub(crate) fn check_exclusive(&self, others: &[&Self]) -> Result<(), Refusal> {
        if self.readonly {
            return Err(Refusal::Buffer(format!("{} is read-only", self.name)));
        }
        let mine = self.addresses();
        for other in others {
            let theirs = other.addresses();
            if mine.start < theirs.end && theirs.start < mine.end {
                return Err(Refusal::Buffer(format!("{} overlaps {} in memory", self.name, other.name)));
            }
        }
        Ok(())
    }

    /// Refuses memory that a caller may not write to as a tensor: [`Block::check_exclusive`], and elements that lie in one place.
    pub(crate) fn check_writable(&self, axes: Axes, others: &[&Self]) -> Result<(), Refusal> {
        self.check_exclusive(others)?;
        let (_, shape, strides) = self.logical(axes)?;
        check_disjoint(shape, strides).map_err(|error| self.refuse(error))
    }

    pub(super) fn refuse(&self, error: flashtile::ViewError) -> Refusal {
        Refusal::Buffer(format!("{}: {error}", self.name))
    }
}

/// Strides, or the ones of dense memory, none negative, and 0 where an axis has fewer than two elements.
fn checked_strides(name: &str, shape: &[usize], strides: Option<Vec<isize>>) -> Result<Vec<usize>, Refusal> {
    if shape.len() > MAX_RANK {
        return Err(Refusal::Value(format!("{name} has {} axes, expected at most {MAX_RANK}", shape.len())));
    }
    let empty = shape.contains(&0);
    let Some(strides) = strides else {
        let mut dense = vec![0; shape.len()];
        let mut next = 1usize;
        for (stride, n) in dense.iter_mut().zip(shape).rev() {
            *stride = if *n < 2 || empty { 0 } else { next };
            next = next.saturating_mul(*n);
        }
        return Ok(dense);
    };
    if strides.len() != shape.len() {
        return Err(Refusal::Buffer(format!("{name} has strides {strides:?} of shape {shape:?}")));
    }
    let one = |(n, stride): (&usize, &isize)| if *n < 2 || empty { Ok(0) } else { usize::try_from(*stride) };
    shape.iter().zip(&strides).map(one).collect::<Result<_, _>>().map_err(|_| {
        let what = format!(
            "{name} has strides {strides:?}, expected none below 0: copy it, as numpy.ascontiguousarray does"
        );
        Refusal::Buffer(what)
    })
}
