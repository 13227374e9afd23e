//! Local arrays: the only places whose elements can be borrowed.

use crate::memory::Place;
use crate::scalar::Index;
use crate::simulator::outside_array;

/// A local array: the only [`Place`] whose elements can be borrowed, for `a[i][j]` and `a[i].field`.
pub trait Elements: Place {
    /// The element at `index`, borrowed.
    ///
    /// # Faults
    /// Where `index` is outside.
    #[track_caller]
    fn ft_at<I: Index>(&self, index: I) -> &Self::Item;

    /// The element at `index`, borrowed for writing.
    ///
    /// # Faults
    /// Where `index` is outside.
    #[track_caller]
    fn ft_at_mut<I: Index>(&mut self, index: I) -> &mut Self::Item;
}

impl<T: Copy, const N: usize> Place for [T; N] {
    type Item = T;

    #[track_caller]
    fn ft_get<I: Index>(&self, index: I) -> T {
        *self.ft_at(index)
    }

    #[track_caller]
    fn ft_set<I: Index>(&mut self, index: I, value: T) {
        *self.ft_at_mut(index) = value;
    }
}

impl<T: Copy, const N: usize> Elements for [T; N] {
    #[track_caller]
    fn ft_at<I: Index>(&self, index: I) -> &T {
        match self.get(index.position() as usize) {
            Some(element) => element,
            None => outside_array(index.position(), N),
        }
    }

    #[track_caller]
    fn ft_at_mut<I: Index>(&mut self, index: I) -> &mut T {
        match self.get_mut(index.position() as usize) {
            Some(element) => element,
            None => outside_array(index.position(), N),
        }
    }
}
