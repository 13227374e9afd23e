//! Memory as a kernel sees it: [`Buffer`]s of the device and [`Shared`] arrays of a threadgroup.
//!
//! Both are handles that only the simulator makes; every access goes through it and is checked there. Elements are
//! copied in and out, so no reference into memory that other threads may write ever exists.

use crate::region::Region;
use crate::scalar::{Bits, Index, Number, Scalar, Value};
use std::fmt;
use std::marker::PhantomData;

/// An array of scalars in device memory: a `&Buffer<T>` or `&mut Buffer<T>` parameter of a kernel.
///
/// In a kernel `buffer[i]` reads and `buffer[i] = x` writes, for an index that is a `u32`, `u64` or `usize`. There is no
/// length on a device: pass it as a parameter, and state `buffer.len()` in the kernel's `requires`.
pub struct Buffer<T> {
    region: Region,
    element: PhantomData<T>,
}

/// An array of scalars shared by the threads of a threadgroup, made by [`shared`](crate::intrinsics::shared).
///
/// It starts uninitialised in every threadgroup.
pub struct Shared<T> {
    region: Region,
    element: PhantomData<T>,
}

/// [`Buffer`] or [`Shared`]: the memory of atomics and fragments.
pub trait Memory: private::Handle {
    /// The type of an element.
    type Item: Scalar;
}

pub(crate) mod private {
    use crate::region::Region;

    /// Hides the regions of handles from other crates, and seals [`Memory`](super::Memory).
    pub trait Handle {
        /// The memory behind the handle.
        #[doc(hidden)]
        fn region(&self) -> &Region;
    }
}

/// Memory that `a[i]` reads and `a[i] = x` writes: buffers, shared arrays and local arrays.
///
/// `#[kernel]` and `#[device]` turn index expressions into these calls.
pub trait Place {
    /// The type of an element.
    type Item;

    /// The element at `index`.
    ///
    /// # Faults
    /// Where `index` is outside, the element is uninitialised or another thread may be writing it.
    #[track_caller]
    fn ft_get<I: Index>(&self, index: I) -> Self::Item;

    /// Replaces the element at `index`.
    ///
    /// # Faults
    /// Where `index` is outside or another thread may be using the element.
    #[track_caller]
    fn ft_set<I: Index>(&mut self, index: I, value: Self::Item);
}

macro_rules! handle {
    ($Handle:ident) => {
        impl<T: Scalar> $Handle<T> {
            #[cfg_attr(not(feature = "simulator"), allow(dead_code))]
            pub(crate) fn new(region: Region) -> Self {
                Self { region, element: PhantomData }
            }

            /// Reads `N` neighbouring elements at once, from element `index` on.
            ///
            /// The size of `N` elements is 1, 2, 4, 8 or 16 bytes, and the address a multiple of it; or the size and the address are
            /// multiples of 16 bytes.
            ///
            /// # Faults
            /// Where the access is not aligned, and as [`Place::ft_get`] for each element.
            #[track_caller]
            pub fn load<const N: usize>(&self, index: impl Index) -> [T; N] {
                self.load_as::<T, N>(index)
            }

            /// Writes `N` neighbouring elements at once, from element `index` on, aligned as in `load`.
            ///
            /// # Faults
            /// Where the access is not aligned, and as [`Place::ft_set`] for each element.
            #[track_caller]
            pub fn store<const N: usize>(&mut self, index: impl Index, values: [T; N]) {
                self.store_as::<T, N>(index, values);
            }

            /// Reads the bytes from element `index` on as `N` little-endian values of `U`, aligned as in `load`.
            ///
            /// # Faults
            /// Where the access is not aligned, and as [`Place::ft_get`] for each element touched.
            #[track_caller]
            pub fn load_as<U: Scalar, const N: usize>(&self, index: impl Index) -> [U; N] {
                let mut values = [U::default(); N];
                let mut rest = values.iter_mut();
                self.region.load(index.position(), U::TYPE, N, &mut |raw| {
                    if let Some(value) = rest.next() {
                        *value = U::from_raw(raw);
                    }
                });
                values
            }

            /// Writes `N` values of `U`, little-endian, to the bytes from element `index` on, aligned as in `load`.
            ///
            /// # Faults
            /// Where the access is not aligned, and as [`Place::ft_set`] for each element touched.
            #[track_caller]
            pub fn store_as<U: Scalar, const N: usize>(&mut self, index: impl Index, values: [U; N]) {
                let mut rest = values.iter();
                self.region
                    .store(index.position(), U::TYPE, N, &mut || rest.next().map_or(0, |x| x.to_raw()));
            }
        }

        impl<T: Scalar> Place for $Handle<T> {
            type Item = T;

            #[track_caller]
            fn ft_get<I: Index>(&self, index: I) -> T {
                T::from_raw(self.region.get(index.position()))
            }

            #[track_caller]
            fn ft_set<I: Index>(&mut self, index: I, value: T) {
                self.region.set(index.position(), value.to_raw());
            }
        }

        impl<T: Scalar> Memory for $Handle<T> {
            type Item = T;
        }

        impl<T> private::Handle for $Handle<T> {
            fn region(&self) -> &Region {
                &self.region
            }
        }

        impl<T> fmt::Debug for $Handle<T> {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.debug_tuple(stringify!($Handle)).field(&self.region.name()).finish()
            }
        }
    };
}
handle!(Buffer);
handle!(Shared);

impl<T> Value for Shared<T> {}
// A field of a struct.
impl<T> Value for &Buffer<T> {}

/// A type with atomic addition and exchange in memory: `u32`, `i32`, `f32`.
#[diagnostic::on_unimplemented(message = "no atomics on `{Self}`", label = "not u32, i32 or f32")]
pub trait Atomic: Number {}
impl Atomic for u32 {}
impl Atomic for i32 {}
impl Atomic for f32 {}

/// A type with all atomics: `u32`, `i32`.
#[diagnostic::on_unimplemented(
    message = "this atomic is for integers, not for `{Self}`",
    label = "not u32 or i32"
)]
pub trait AtomicInteger: Atomic + Bits {}
impl AtomicInteger for u32 {}
impl AtomicInteger for i32 {}
