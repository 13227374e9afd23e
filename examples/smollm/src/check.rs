//! Checks the program: its tokenizer against known tokens, flashtile's attention against plain candle operations, and speculative decoding
//! against decoding one by one.

use crate::model::Model;
use crate::session::{CHUNK, Sampler};
use crate::tokenizer::{Chat, Message};
use crate::{CacheOptions, Decoding, Options, Reply, generate, load};
use anyhow::{Result, ensure};
use candle_core::{D, Device, Tensor};
use candle_nn::ops::{log_softmax, softmax_last_dim};
use flashtile_candle::flashtile::Codec;
use std::time::Instant;

/// Tokens of a reply, unless the options say.
const TOKENS: usize = 48;

/// Next tokens that another cache has to agree with, of all; and how much it may add to their mean negative log-likelihood.
const AGREEMENT: f64 = 0.9;
const MAX_RISE: f32 = 0.05;

/// Prompts, and the first tokens of greedy replies by Hugging Face transformers, which reads the same file into F32.
const PROMPTS: [(&str, &[u32]); 5] = [
    (
        "Write a short poem about the sea.",
        &[504, 6147, 282, 260, 5065, 28, 253, 14886, 17942, 351, 1029, 28, 198, 49, 16495, 282],
    ),
    ("Count from 1 to 20.", &[33, 30, 216, 33, 198, 34, 30, 216, 34, 198, 35, 30, 216, 35, 198, 36]),
    (
        "Explain in two sentences why the sky is blue.",
        &[504, 6376, 314, 4461, 975, 282, 253, 980, 1217, 13739, 43464, 24484, 28, 837, 1420, 13242],
    ),
    (
        "Repeat this sentence three times: the quick brown fox jumps over the lazy dog.",
        &[504, 2365, 6354, 16438, 27003, 690, 23790, 2767, 30],
    ),
    // The latest continuation of the last tokens is wrong at times, and the one before right: both branches of drafts are accepted.
    ("List these pairs again: a1 b2 c3 a1 b4 c5 a1 b2 c3 a1 b4 c7 a1 b2 c3 a1 b4 c5.", &[]),
];

/// Tokens of texts. llama.cpp gives the same number of tokens for each.
const TOKENIZED: [(&str, &[u32]); 5] = [
    ("In 1984 there were", &[788, 216, 33, 41, 40, 36, 665, 592]),
    ("  two  spaces\n\n\tand a tab", &[216, 827, 216, 5600, 1116, 197, 397, 253, 10147]),
    ("don't you'll we've", &[12420, 982, 346, 3060, 392, 3543]),
    ("naïve café — 日本語 🙂", &[3546, 46494, 37366, 1841, 17097, 241, 115, 40993, 179, 120, 248, 47526]),
    ("<|im_start|>user\nHi<|im_end|>\n", &[1, 4093, 198, 26843, 2, 198]),
];

/// Attention in candle's operations. Keys and values are tensors that grow.
struct PlainAttention {
    /// k and v `(tokens, kv_heads, dim)` of each layer.
    rows: Vec<Option<[Tensor; 2]>>,
}

impl PlainAttention {
    fn attend(&mut self, layer: usize, q: &Tensor, k: &Tensor, v: &Tensor) -> candle_core::Result<Tensor> {
        let [k, v] = match self.rows[layer].take() {
            None => [k.clone(), v.clone()],
            Some([keys, values]) => [Tensor::cat(&[&keys, k], 0)?, Tensor::cat(&[&values, v], 0)?],
        };
        let ((new, heads, dim), (all, kv_heads, _)) = (q.dims3()?, k.dims3()?);
        let group = heads / kv_heads;
        // (kv_heads, group, new, dim): the heads of a group have the same keys.
        let q = q.reshape((new, kv_heads, group, dim))?.permute((1, 2, 0, 3))?;
        let q = q.reshape((kv_heads, group * new, dim))?;
        let scores = (q.matmul(&k.permute((1, 2, 0))?)? / (dim as f64).sqrt())?;
        let hidden = |row, key| if key > all - new + row { f32::NEG_INFINITY } else { 0.0 };
        let mask = (0..new).flat_map(|row| (0..all).map(move |key| hidden(row, key)));
        let mask = Tensor::from_vec(mask.collect::<Vec<_>>(), (new, all), &Device::Cpu)?;
        let scores = scores.reshape((heads, new, all))?.broadcast_add(&mask)?;
        let probs = softmax_last_dim(&scores)?.reshape((kv_heads, group * new, all))?;
        let out = probs.matmul(&v.permute((1, 0, 2))?.contiguous()?)?;
        let out = out.reshape((kv_heads, group, new, dim))?.permute((2, 0, 1, 3))?;
        self.rows[layer] = Some([k, v]);
        out.reshape((new, heads, dim))
    }
}

/// The negative log-likelihood of a token.
fn nll(logits: &Tensor, token: u32) -> Result<f32> {
    Ok(-log_softmax(logits, D::Minus1)?.get(token as usize)?.to_scalar::<f32>()?)
}

/// The reply by plain attention, and the negative log-likelihoods of its tokens.
fn plain(model: &Model, prompt: &[u32], (end, max_tokens): (u32, usize)) -> Result<(Reply, Vec<f32>)> {
    let mut attention = PlainAttention { rows: vec![None; model.config().layers] };
    let mut run = |tokens: &[u32], start: usize| {
        let positions: Vec<u32> = (start..start + tokens.len()).map(|position| position as u32).collect();
        model.forward(tokens, &positions, |layer, q, k, v| attention.attend(layer, q, k, v))
    };
    let (mut reply, mut likelihoods) = (Reply::default(), Vec::new());
    let (mut last, before) = (prompt[prompt.len() - 1], &prompt[..prompt.len() - 1]);
    for (n, chunk) in before.chunks(CHUNK).enumerate() {
        run(chunk, n * CHUNK)?;
    }
    let start = Instant::now();
    while reply.tokens.len() < max_tokens {
        let hidden = run(&[last], before.len() + reply.steps)?;
        reply.steps += 1;
        let logits = model.logits(&hidden)?.squeeze(0)?;
        last = Sampler::Greedy.choose(&logits)?;
        if last == end {
            break;
        }
        reply.tokens.push(last);
        likelihoods.push(nll(&logits, last)?);
    }
    reply.time = start.elapsed();
    Ok((reply, likelihoods))
}

/// How another cache sees a reply: the next tokens that agree, and the negative log-likelihoods of all.
fn follow(model: &Model, cache: CacheOptions, prompt: &[u32], reply: &[u32]) -> Result<(usize, Vec<f32>)> {
    let mut session = cache.session(model)?;
    session.set_tokens(prompt.to_vec())?;
    let (mut agreed, mut likelihoods) = (0, Vec::new());
    for &token in reply {
        let logits = session.logits()?;
        agreed += usize::from(Sampler::Greedy.choose(&logits)? == token);
        likelihoods.push(nll(&logits, token)?);
        session.tokens.push(token);
    }
    Ok((agreed, likelihoods))
}

fn print(what: &str, reply: &Reply, said: &str) {
    let per_step = reply.tokens.len() as f64 / reply.steps.max(1) as f64;
    println!("  {what:24} {:7.1} tokens/s, {per_step:.2} tokens/step  {said}", reply.tokens_per_second());
}

/// The models, caches and limits of every prompt.
struct Check<'a> {
    chat: &'a Chat,
    /// With quantized matrices: a row of their products is the same in any company.
    quantized: &'a Model,
    /// With matrices of F32: their products do not turn a small difference into another rounding.
    exact: &'a Model,
    cache: CacheOptions,
    max_tokens: usize,
}

/// Sums over prompts, of what [`Check::cache`] gives and of plain attention.
#[derive(Default)]
struct Sums {
    tokens: usize,
    agreed: usize,
    plain: f32,
    followed: f32,
}

impl Check<'_> {
    fn reply(&self, model: &Model, cache: CacheOptions, prompt: &[u32], mut by: Decoding) -> Result<Reply> {
        let mut session = cache.session(model)?;
        session.set_tokens(prompt.to_vec())?;
        generate(&mut session, &mut by, (self.chat.end, self.max_tokens), |_| Ok(()))
    }

    /// Checks a prompt; `known` are the first tokens of its reply, if they are known.
    fn prompt(&self, content: &str, known: &[u32], sums: &mut Sums) -> Result<()> {
        let message = Message { role: "user", content: content.to_owned() };
        let prompt = self.chat.prompt(&[message])?;
        let limits = (self.chat.end, self.max_tokens);
        let f16 = CacheOptions {
            k_codec: Codec::F16,
            v_codec: Codec::F16,
            keep_first: 0,
            keep_last: 0,
            ..self.cache
        };

        let (expected, likelihoods) = plain(self.exact, &prompt, limits)?;
        let expected = expected.tokens;
        let equal = known.iter().zip(&expected).all(|(a, b)| a == b);
        ensure!(equal, "candle operations give {expected:?}, expected {known:?}");
        let got = self.reply(self.exact, f16, &prompt, Decoding::Sample(Sampler::Greedy))?.tokens;
        ensure!(got == expected, "over f16 the tokens are {got:?}, by candle operations {expected:?}");
        let (agreed, followed) = follow(self.exact, self.cache, &prompt, &expected)?;
        let title: String = content.chars().take(60).collect();
        println!("{title:?}: {} tokens, then {}", prompt.len(), expected.len());
        println!(
            "  f16+f16 gives the same tokens as candle operations, {} {agreed} of them",
            self.cache.name()
        );
        sums.tokens += followed.len();
        sums.agreed += agreed;
        sums.plain += likelihoods.iter().sum::<f32>();
        sums.followed += followed.iter().sum::<f32>();

        print("candle operations", &plain(self.quantized, &prompt, limits)?.0, "");
        for cache in [f16, self.cache] {
            let name = cache.name();
            let one = self.reply(self.quantized, cache, &prompt, Decoding::Sample(Sampler::Greedy))?;
            let speculative = self.reply(self.quantized, cache, &prompt, Decoding::Speculate)?;
            let (got, expected) = (&speculative.tokens, &one.tokens);
            ensure!(
                got == expected,
                "speculation over {name} gives {got:?}, decoding one by one {expected:?}"
            );
            print(&name, &one, "");
            print("  speculative", &speculative, "the same tokens");
        }
        Ok(())
    }
}

/// Checks the tokenizer, and the prompt of the options or all of [`PROMPTS`].
pub fn run(quantized: &Model, chat: &Chat, options: &Options) -> Result<()> {
    for (text, expected) in TOKENIZED {
        let got = chat.tokens(text)?;
        ensure!(got == expected, "{text:?} has the tokens {got:?}, expected {expected:?}");
        let back = chat.tokenizer.decode(&got, false).map_err(anyhow::Error::msg)?;
        ensure!(back == text, "the tokens of {text:?} are the text {back:?}");
    }
    let (exact, _) = load(&options.model, true)?;
    let max_tokens = options.max_tokens.unwrap_or(TOKENS);
    let check = Check { chat, quantized, exact: &exact, cache: options.cache, max_tokens };
    let mut sums = Sums::default();
    match &options.prompt {
        Some(prompt) => check.prompt(prompt, &[], &mut sums)?,
        None => PROMPTS.iter().try_for_each(|(prompt, known)| check.prompt(prompt, known, &mut sums))?,
    }
    let Sums { tokens, agreed, plain, followed } = sums;
    let rise = (followed - plain) / tokens.max(1) as f32;
    let name = options.cache.name();
    println!("{name}: {agreed} of {tokens} next tokens agree, mean negative log-likelihood {rise:+.4}");
    ensure!(agreed as f64 >= AGREEMENT * tokens as f64, "expected {AGREEMENT} of the tokens to agree");
    ensure!(rise <= MAX_RISE, "expected a rise of {MAX_RISE} at most");
    Ok(())
}
