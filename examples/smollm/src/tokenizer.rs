//! The tokenizer and the chat template, from the metadata of a GGUF file.

use crate::model::value;
use anyhow::{Error, Result, bail, ensure};
use candle_core::quantized::gguf_file::Value;
use minijinja::{Environment, context};
use serde::Serialize;
use std::collections::HashMap;
use tokenizers::models::bpe::{BPE, Merges, Vocab};
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::pre_tokenizers::digits::Digits;
use tokenizers::pre_tokenizers::sequence::Sequence;
use tokenizers::{AddedToken, Tokenizer};

/// Metadata of a file.
type Metadata = HashMap<String, Value>;

/// The type of tokens that no text has: they stand for turns of a conversation and the like.
const CONTROL: i32 = 3;

/// A message of a conversation.
#[derive(Debug, Clone, Serialize)]
pub struct Message {
    pub role: &'static str,
    pub content: String,
}

/// Text to tokens, and back.
pub struct Chat {
    pub tokenizer: Tokenizer,
    /// The token that ends a reply.
    pub end: u32,
    template: String,
}

impl Chat {
    /// Builds the tokenizer of SmolLM, and refuses others.
    pub fn read(metadata: &Metadata) -> Result<Self> {
        let text = |key: &str| value(metadata, key)?.to_string();
        for (key, expected) in [("tokenizer.ggml.model", "gpt2"), ("tokenizer.ggml.pre", "smollm")] {
            let got = text(key)?;
            ensure!(got == expected, "{key} is {got}, expected {expected}");
        }
        let tokens = texts(metadata, "tokenizer.ggml.tokens")?;
        let vocab: Vocab = tokens.iter().zip(0..).map(|(token, id)| (String::clone(token), id)).collect();
        let bpe = BPE::builder().vocab_and_merges(vocab, merges(metadata)?).build().map_err(Error::msg)?;
        let mut tokenizer = Tokenizer::new(bpe);
        // GPT-2's, but that each digit is a token.
        let digits = Digits::new(true).into();
        let bytes = ByteLevel::new(false, true, true);
        tokenizer.with_pre_tokenizer(Some(Sequence::new(vec![digits, bytes.into()])));
        tokenizer.with_decoder(Some(bytes));
        let types = value(metadata, "tokenizer.ggml.token_type")?.to_vec()?;
        let types = types.iter().map(Value::to_i32).collect::<candle_core::Result<Vec<_>>>()?;
        let control = tokens.iter().zip(types).filter(|&(_, of)| of == CONTROL);
        let control = control.map(|(&token, _)| AddedToken::from(token.clone(), true));
        tokenizer.add_special_tokens(control).map_err(Error::msg)?;
        Ok(Self {
            tokenizer,
            end: value(metadata, "tokenizer.ggml.eos_token_id")?.to_u32()?,
            template: text("tokenizer.chat_template")?.clone(),
        })
    }

    /// The tokens of a text.
    pub fn tokens(&self, text: &str) -> Result<Vec<u32>> {
        Ok(self.tokenizer.encode(text, false).map_err(Error::msg)?.get_ids().to_vec())
    }

    /// The tokens of a conversation, up to where the reply begins.
    pub fn prompt(&self, messages: &[Message]) -> Result<Vec<u32>> {
        let mut jinja = Environment::new();
        jinja.add_template("chat", &self.template)?;
        let text =
            jinja.get_template("chat")?.render(context! { messages, add_generation_prompt => true })?;
        self.tokens(&text)
    }
}

/// A list of strings.
fn texts<'a>(metadata: &'a Metadata, key: &str) -> Result<Vec<&'a String>> {
    let list = value(metadata, key)?.to_vec()?;
    Ok(list.iter().map(Value::to_string).collect::<candle_core::Result<_>>()?)
}

/// Pairs of tokens that become one, in order of precedence.
fn merges(metadata: &Metadata) -> Result<Merges> {
    let pair = |merge: &String| match merge.split_once(' ') {
        Some((left, right)) => Ok((left.to_owned(), right.to_owned())),
        None => bail!("the merge {merge} has no space between its two tokens"),
    };
    texts(metadata, "tokenizer.ggml.merges")?.into_iter().map(pair).collect()
}
