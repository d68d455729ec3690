// Ollama's package for Node: chats, prompts, schemas, vectors, refusals.

import assert from 'node:assert/strict'
import { test } from 'node:test'

import { Ollama } from 'ollama'

const MODEL = 'everstream-stories'
const host = process.env.EVERSTREAM_URL
const headers = { Authorization: 'Bearer usual' }
const api = new Ollama({ host, headers })
const messages = [{ role: 'user', content: 'Tell me of the old mill.' }]
const options = { num_predict: 24, seed: 5, ignore_eos: true }

test('models are listed and shown', async () => {
  const { models } = await api.list()
  assert.equal(models[0].name, `${MODEL}:latest`)
  assert.equal((await api.ps()).models.length, 1)
  assert.ok((await api.show({ model: MODEL })).capabilities.includes('completion'))
})

test('a chat whole and streamed is one text', async () => {
  const whole = await api.chat({ model: MODEL, messages, options })
  assert.equal(whole.eval_count, 24)
  let text = ''
  for await (const part of await api.chat({ model: MODEL, messages, options, stream: true }))
    text += part.message.content
  assert.equal(text, whole.message.content)
})

test('a prompt is completed', async () => {
  const said = await api.generate({ model: MODEL, prompt: 'Once', raw: true, options })
  assert.ok(said.response.length > 0)
})

test('a schema is followed', async () => {
  const format = {
    type: 'object', properties: { age: { type: 'integer', maximum: 20 } },
    required: ['age'], additionalProperties: false,
  }
  const said = await api.chat({ model: MODEL, messages, format, options })
  assert.ok(Number.isInteger(JSON.parse(said.message.content).age))
})

test('vectors come one for each text', async () => {
  const { embeddings } = await api.embed({ model: MODEL, input: ['a mill', 'a river'] })
  assert.equal(embeddings.length, 2)
})

test('a refusal names the field', async () => {
  const wrong = { ...options, mirostat: 2 }
  await assert.rejects(api.chat({ model: MODEL, messages, options: wrong }), /options\.mirostat/)
})
