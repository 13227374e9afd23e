//! The memory that a handle refers to during a launch.

use crate::scalar::ScalarType;
use std::fmt;
use std::panic::Location;
use std::rc::Rc;

/// Where in the user's source an access is.
pub(crate) type At = &'static Location<'static>;

/// A run of elements in memory, with the checks of every access: implemented by devices that run native code.
///
/// Elements are passed as their bits, zero-extended. An access that is not allowed ends the thread with a fault at `at`, because
/// `#[track_caller]` does not reach through `dyn`.
pub(crate) trait RegionAccess: fmt::Debug {
    /// The parameter or variable that the run was made for.
    fn name(&self) -> &'static str;

    /// Elements.
    #[cfg(feature = "simulator")]
    fn len(&self) -> usize;

    /// Element `index`.
    fn get(&self, index: u64, at: At) -> u64;

    /// Replaces element `index`.
    fn set(&self, index: u64, raw: u64, at: At);

    /// Passes `count` values of type `scalar`, which start at element `index`, to `put`.
    fn load(&self, index: u64, scalar: ScalarType, count: usize, put: &mut dyn FnMut(u64), at: At);

    /// Writes `count` values of type `scalar` from `next`, which start at element `index`.
    fn store(&self, index: u64, scalar: ScalarType, count: usize, next: &mut dyn FnMut() -> u64, at: At);

    /// Replaces element `index` by `new` of it in one step; returns its value before.
    fn update(&self, index: u64, new: &dyn Fn(u64) -> u64, at: At) -> u64;
}

/// A run of elements in memory during a launch.
#[derive(Clone, Debug)]
pub struct Region(Rc<dyn RegionAccess>);

impl Region {
    #[cfg(feature = "simulator")]
    pub(crate) fn new(access: impl RegionAccess + 'static) -> Self {
        Self(Rc::new(access))
    }

    /// The parameter or variable that the region was made for.
    pub(crate) fn name(&self) -> &'static str {
        self.0.name()
    }

    /// Elements.
    #[cfg(feature = "simulator")]
    pub(crate) fn len(&self) -> usize {
        self.0.len()
    }

    /// The bits of element `index`.
    #[track_caller]
    pub(crate) fn get(&self, index: u64) -> u64 {
        self.0.get(index, Location::caller())
    }

    /// Replaces the bits of element `index`.
    #[track_caller]
    pub(crate) fn set(&self, index: u64, raw: u64) {
        self.0.set(index, raw, Location::caller());
    }

    /// Passes the bits of `count` values of type `scalar`, which start at element `index`, to `put`.
    #[track_caller]
    pub(crate) fn load(&self, index: u64, scalar: ScalarType, count: usize, put: &mut dyn FnMut(u64)) {
        self.0.load(index, scalar, count, put, Location::caller());
    }

    /// Writes the bits of `count` values of type `scalar` from `next`, which start at element `index`.
    #[track_caller]
    pub(crate) fn store(&self, index: u64, scalar: ScalarType, count: usize, next: &mut dyn FnMut() -> u64) {
        self.0.store(index, scalar, count, next, Location::caller());
    }

    /// Replaces the bits of element `index` by `new` of them in one step; returns the bits before.
    #[track_caller]
    pub(crate) fn update(&self, index: u64, new: &dyn Fn(u64) -> u64) -> u64 {
        self.0.update(index, new, Location::caller())
    }
}
