//! A chat with SmolLM2 on the terminal: candle reads the GGUF file and multiplies matrices, flashtile attends over its quantized cache.
//!
//! ```sh
//! examples/smollm/fetch.py target/smollm
//! cargo run --release --manifest-path examples/smollm/Cargo.toml -- target/smollm/SmolLM2-135M-Instruct.Q4_1.gguf
//! ```

mod check;
mod model;
mod session;
mod speculate;
mod tokenizer;

use anyhow::{Context, Result, ensure};
use candle_core::quantized::gguf_file::Content;
use clap::Parser;
use flashtile_candle::flashtile::{CacheDesc, CacheLayout, Codec};
use indicatif::{ProgressBar, ProgressStyle};
use model::{Config, Model, Tensors};
use rand::SeedableRng;
use rand::rngs::StdRng;
use session::{Sampler, Session};
use std::io::{BufRead, BufReader, IsTerminal, Write, stderr, stdin, stdout};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, Instant};
use tokenizer::{Chat, Message};

/// Tokens of a page of the cache.
const PAGE: usize = 64;

/// Tokens of a reply at most.
const MAX_TOKENS: usize = 512;

/// A chat with a Llama of SmolLM's family, such as SmolLM2-135M-Instruct, over a quantized KV cache.
#[derive(Debug, Parser)]
struct Options {
    /// The model, a GGUF file: fetch.py downloads one.
    model: PathBuf,
    /// A single prompt. Without it, each line of the standard input is one, of a single conversation.
    prompt: Option<String>,
    #[command(flatten)]
    cache: CacheOptions,
    /// Tokens of a reply at most: 512, or 48 with --check.
    #[arg(long)]
    max_tokens: Option<usize>,
    /// Chooses tokens at random, by the softmax of logits over this temperature. 0 chooses the largest logit.
    #[arg(long, default_value_t = 0.0)]
    temperature: f64,
    /// Seed of the random choices.
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// Computes drafts of several tokens in a step, found in the conversation: the same tokens, sooner where replies repeat it, later elsewhere.
    #[arg(long, conflicts_with = "temperature")]
    speculate: bool,
    /// Compares tokens with attention in plain candle operations, for the prompt or for a list of them, and prints speeds.
    #[arg(long, conflicts_with_all = ["temperature", "speculate"])]
    check: bool,
}

/// How the cache stores keys and values.
#[derive(Debug, Clone, Copy, clap::Args)]
struct CacheOptions {
    /// Codec of the keys: f16, bf16, f32, fp8, int8, or tq6 to tq2.
    #[arg(long, default_value = "int8")]
    k_codec: Codec,
    /// Codec of the values.
    #[arg(long, default_value = "tq4")]
    v_codec: Codec,
    /// First tokens that stay in 16 bits beside their codes.
    #[arg(long, default_value_t = 0)]
    keep_first: usize,
    /// Last tokens that stay in 16 bits beside their codes.
    #[arg(long, default_value_t = 0)]
    keep_last: usize,
    /// Tokens that the cache has room for.
    #[arg(long, default_value_t = 8192)]
    context: usize,
}

impl CacheOptions {
    fn desc(self, model: &Config) -> Result<CacheDesc> {
        let Self { k_codec, v_codec, keep_first, keep_last, context } = self;
        let trained = model.context;
        ensure!((1..=trained).contains(&context), "--context is {context}, expected 1 to {trained}");
        let layout = CacheLayout::Paged { pages: context.div_ceil(PAGE), page_size: PAGE };
        let mut desc = CacheDesc::new(layout, model.cache_shape(), k_codec).with_codecs(k_codec, v_codec);
        desc = desc.with_kept(keep_first, keep_last);
        // The conversation is one sequence.
        desc.keep_slots = usize::from(keep_first > 0 || keep_last > 0);
        Ok(desc)
    }

    fn name(self) -> String {
        let kept = match (self.keep_first, self.keep_last) {
            (0, 0) => String::new(),
            (first, last) => format!(", {first} first and {last} last tokens in 16 bits"),
        };
        format!("{}+{}{kept}", self.k_codec, self.v_codec)
    }

    fn session(self, model: &Model) -> Result<Session<'_>> {
        Session::new(model, self.desc(model.config())?, self.context)
    }
}

/// Where the next tokens come from.
enum Decoding {
    Sample(Sampler),
    Speculate,
}

impl Decoding {
    /// Adds one or more tokens to a session.
    fn next(&mut self, session: &mut Session<'_>) -> Result<Vec<u32>> {
        match self {
            Self::Sample(sampler) => {
                let token = sampler.choose(&session.logits()?)?;
                session.tokens.push(token);
                Ok(vec![token])
            }
            Self::Speculate => speculate::next(session),
        }
    }
}

/// Tokens of a reply, and the time that they took.
#[derive(Debug, Default)]
struct Reply {
    tokens: Vec<u32>,
    steps: usize,
    time: Duration,
    prompt_tokens: usize,
    prompt_time: Duration,
}

impl Reply {
    fn tokens_per_second(&self) -> f64 {
        self.tokens.len() as f64 / self.time.as_secs_f64()
    }
}

/// Generates tokens up to `end`, a number of them, or the end of the context, and gives each to a function.
fn generate(
    session: &mut Session<'_>,
    decoding: &mut Decoding,
    (end, max_tokens): (u32, usize),
    mut emit: impl FnMut(u32) -> Result<()>,
) -> Result<Reply> {
    let start = Instant::now();
    let mut reply = Reply { prompt_tokens: session.prefill()?, ..Reply::default() };
    reply.prompt_time = start.elapsed();
    let start = Instant::now();
    'steps: while reply.tokens.len() < max_tokens && session.tokens.len() <= session.context {
        reply.steps += 1;
        for token in decoding.next(session)? {
            if token == end || reply.tokens.len() == max_tokens {
                break 'steps;
            }
            emit(token)?;
            reply.tokens.push(token);
        }
    }
    reply.time = start.elapsed();
    Ok(reply)
}

/// Reads the model, with matrices of F32 if asked to, and its tokenizer. Shows progress on a terminal.
fn load(path: &Path, f32: bool) -> Result<(Model, Chat)> {
    let file = std::fs::File::open(path).with_context(|| format!("{}", path.display()))?;
    let mut file = BufReader::new(file);
    let content = Content::read(&mut file).with_context(|| format!("{}", path.display()))?;
    let bar = ProgressBar::new(content.tensor_infos.len() as u64)
        .with_style(ProgressStyle::with_template("{bar:40} {pos}/{len} tensors")?);
    let model = Model::read(Tensors { content: &content, file, f32, progress: &|| bar.inc(1) })?;
    bar.finish_and_clear();
    Ok((model, Chat::read(&content.metadata)?))
}

/// Generates the reply to the last message, and prints it and its speed.
fn answer(
    session: &mut Session<'_>,
    decoding: &mut Decoding,
    chat: &Chat,
    messages: &mut Vec<Message>,
    max_tokens: usize,
) -> Result<()> {
    session.set_tokens(chat.prompt(messages)?)?;
    let mut stream = chat.tokenizer.decode_stream(true);
    let mut content = String::new();
    let reply = generate(session, decoding, (chat.end, max_tokens), |token| {
        if let Some(text) = stream.step(token).map_err(anyhow::Error::msg)? {
            content += &text;
            print!("{text}");
            stdout().flush()?;
        }
        Ok(())
    })?;
    println!();
    messages.push(Message { role: "assistant", content });
    let memory = session.cache.memory();
    eprintln!(
        "[{} tokens of prompt in {:.2} s; {} tokens in {} steps, {:.1} tokens/s; cache: {} tokens, {:.2} MB]",
        reply.prompt_tokens,
        reply.prompt_time.as_secs_f64(),
        reply.tokens.len(),
        reply.steps,
        reply.tokens_per_second(),
        memory.tokens,
        memory.bytes_used as f64 / 1e6,
    );
    if session.tokens.len() > session.context {
        eprintln!("[the context is full: --context {}]", session.context);
    }
    Ok(())
}

fn main() -> ExitCode {
    match run(Options::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(options: Options) -> Result<()> {
    let (model, chat) = load(&options.model, false)?;
    if options.check {
        return check::run(&model, &chat, &options);
    }
    let mut session = options.cache.session(&model)?;
    let mut decoding = match options {
        Options { speculate: true, .. } => Decoding::Speculate,
        Options { temperature, .. } if temperature == 0.0 => Decoding::Sample(Sampler::Greedy),
        Options { temperature, seed, .. } => {
            ensure!(temperature > 0.0, "--temperature is {temperature}, expected 0 or more");
            Decoding::Sample(Sampler::Temperature(temperature, Box::new(StdRng::seed_from_u64(seed))))
        }
    };
    let max_tokens = options.max_tokens.unwrap_or(MAX_TOKENS);
    let mut messages = Vec::new();
    let mut say = |content: String| {
        messages.push(Message { role: "user", content });
        answer(&mut session, &mut decoding, &chat, &mut messages, max_tokens)
    };
    if let Some(prompt) = options.prompt {
        return say(prompt);
    }
    let mut lines = stdin().lock().lines();
    loop {
        if stdin().is_terminal() {
            eprint!("> ");
            stderr().flush()?;
        }
        match lines.next().transpose()? {
            Some(line) if line.trim().is_empty() => {}
            Some(line) => say(line)?,
            None => return Ok(()),
        }
    }
}
