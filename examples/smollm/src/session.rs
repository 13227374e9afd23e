//! A conversation: its tokens, and a cache with the keys and values of all but the last few.

use crate::model::Model;
use anyhow::{Result, ensure};
use candle_core::{D, Tensor};
use flashtile_candle::KvCache;
use flashtile_candle::flashtile::{CacheDesc, SeqId};
use rand::distr::Distribution;
use rand::distr::weighted::WeightedIndex;
use rand::rngs::StdRng;

/// Tokens of a prompt that are computed at once.
pub const CHUNK: usize = 256;

/// Tokens and the rows of the first of them.
pub struct Session<'m> {
    pub model: &'m Model,
    pub cache: KvCache,
    /// The sequence in the cache.
    pub seq: SeqId,
    /// Tokens that the cache has room for.
    pub context: usize,
    /// All tokens. The cache has rows of the first ones; the others, at least one, are pending.
    pub tokens: Vec<u32>,
}

impl<'m> Session<'m> {
    pub fn new(model: &'m Model, cache: CacheDesc, context: usize) -> Result<Self> {
        let mut cache = KvCache::new(cache)?;
        let seq = cache.create()?;
        Ok(Self { model, cache, seq, context, tokens: Vec::new() })
    }

    /// Replaces the tokens. The cache keeps the rows of the first tokens that are the same.
    pub fn set_tokens(&mut self, tokens: Vec<u32>) -> Result<()> {
        ensure!(!tokens.is_empty(), "there are no tokens to begin with");
        ensure!(
            tokens.len() <= self.context,
            "the conversation has {} tokens, the cache has room for {}: --context makes it larger",
            tokens.len(),
            self.context
        );
        let common = self.tokens.iter().zip(&tokens).take_while(|(a, b)| a == b).count();
        let kept = common.min(tokens.len() - 1).min(self.cached()?);
        self.cache.truncate(self.seq, kept)?;
        self.tokens = tokens;
        Ok(())
    }

    /// The number of tokens whose rows the cache has.
    pub fn cached(&self) -> Result<usize> {
        Ok(self.cache.len(self.seq)?)
    }

    /// Computes all tokens but the last; the number of them.
    pub fn prefill(&mut self) -> Result<usize> {
        let (start, end) = (self.cached()?, self.tokens.len() - 1);
        for at in (start..end).step_by(CHUNK) {
            self.run(at..end.min(at + CHUNK))?;
        }
        Ok(end - start)
    }

    /// Computes the tokens that are pending; the logits `(vocabulary)` of the token after them.
    pub fn logits(&mut self) -> Result<Tensor> {
        self.prefill()?;
        let last = self.tokens.len() - 1;
        let hidden = self.run(last..last + 1)?;
        Ok(self.model.logits(&hidden)?.squeeze(0)?)
    }

    /// Hidden states of tokens, whose rows are added to the cache.
    fn run(&mut self, tokens: std::ops::Range<usize>) -> Result<Tensor> {
        let mut step = self.cache.step(&[(self.seq, tokens.len())])?;
        let positions: Vec<u32> = step.positions().map(|position| position as u32).collect();
        let attend = |layer, q: &_, k: &_, v: &_| step.attend(layer, q, k, v);
        let hidden = self.model.forward(&self.tokens[tokens], &positions, attend)?;
        step.finish()?;
        Ok(hidden)
    }
}

/// How tokens are chosen from logits.
pub enum Sampler {
    /// The largest logit.
    Greedy,
    /// By the softmax of logits over a temperature.
    Temperature(f64, Box<StdRng>),
}

impl Sampler {
    /// Chooses from logits `(vocabulary)`.
    pub fn choose(&mut self, logits: &Tensor) -> Result<u32> {
        match self {
            Self::Greedy => Ok(logits.argmax(D::Minus1)?.to_scalar()?),
            Self::Temperature(temperature, rng) => {
                let probs = candle_nn::ops::softmax_last_dim(&(logits / *temperature)?)?;
                Ok(WeightedIndex::new(probs.to_vec1::<f32>()?)?.sample(rng) as u32)
            }
        }
    }
}
