//! Checks of means and factors of keys.

use super::desc::CacheDesc;
use super::key_error::KeyTransformError;
use crate::codec::KEY_FACTOR_RANGE;

impl CacheDesc {
    /// Checks the length of a part of the key transform.
    const fn check_length(&self, part: &'static str, got: usize) -> Result<(), KeyTransformError> {
        let expected = self.kv_heads * self.head_dim;
        if got == expected { Ok(()) } else { Err(KeyTransformError::Length { part, got, expected }) }
    }

    /// Checks that keys can have a mean, and that it is whole and finite.
    pub(super) fn check_key_mean(&self, mean: &[f32]) -> Result<(), KeyTransformError> {
        self.check_length("mean", mean.len())?;
        if self.k.dtype().is_some() {
            Err(KeyTransformError::MeanOfElements { codec: self.k })
        } else if mean.iter().all(|x| x.is_finite()) {
            Ok(())
        } else {
            Err(KeyTransformError::MeanNotFinite)
        }
    }

    /// Checks that keys can have factors, and that these are whole and in their range.
    pub(super) fn check_key_factors(&self, factors: &[f32]) -> Result<(), KeyTransformError> {
        self.check_length("factors", factors.len())?;
        if !self.k.supports_key_factors() {
            return Err(KeyTransformError::FactorsOfCodec { codec: self.k });
        }
        let outside = factors.iter().position(|factor| !KEY_FACTOR_RANGE.contains(&factor.abs()));
        outside.map_or(Ok(()), |at| {
            Err(KeyTransformError::FactorRange { head: at / self.head_dim, channel: at % self.head_dim })
        })
    }
}
