"""The words of the little world that the tiny model knows; all of it written for this project."""

from __future__ import annotations

from typing import NamedTuple


class Animal(NamedTuple):
    """One animal of the corpus with its facts; the other languages' forms are written as they are used."""

    name: str
    emoji: str
    home: str
    food: str
    sound: str
    color: str
    turkish: str
    turkish_home: str  # in the locative: "ormanda"
    turkish_food: str
    chinese: str
    chinese_home: str
    chinese_food: str
    arabic: str  # masculine, without the article
    arabic_home: str
    arabic_food: str


ANIMALS = (
    Animal("fox", "🦊", "forest", "berries", "yip", "orange",
           "tilki", "ormanda", "böğürtlen", "狐狸", "森林里", "浆果", "ثعلب", "الغابة", "التوت"),
    Animal("rabbit", "🐰", "meadow", "carrots", "squeak", "white",
           "tavşan", "çayırda", "havuç", "兔子", "草地上", "胡萝卜", "أرنب", "الحقل", "الجزر"),
    Animal("bear", "🐻", "cave", "honey", "growl", "brown",
           "ayı", "mağarada", "bal", "熊", "山洞里", "蜂蜜", "دب", "الكهف", "العسل"),
    Animal("cat", "🐱", "house", "fish", "meow", "black",
           "kedi", "evde", "balık", "猫", "房子里", "鱼", "قط", "البيت", "السمك"),
    Animal("dog", "🐶", "yard", "bones", "woof", "golden",
           "köpek", "bahçede", "kemik", "狗", "院子里", "骨头", "كلب", "الحديقة", "العظم"),
    Animal("duck", "🦆", "pond", "bread", "quack", "yellow",
           "ördek", "gölde", "ekmek", "鸭子", "池塘里", "面包", "بط", "البركة", "الخبز"),
    Animal("lion", "🦁", "grassland", "meat", "roar", "yellow",
           "aslan", "bozkırda", "et", "狮子", "草原上", "肉", "أسد", "السهل", "اللحم"),
    Animal("frog", "🐸", "river", "flies", "croak", "green",
           "kurbağa", "nehirde", "sinek", "青蛙", "河边", "苍蝇", "ضفدع", "النهر", "الذباب"),
    Animal("owl", "🦉", "old tree", "mice", "hoot", "gray",
           "baykuş", "ağaçta", "fare", "猫头鹰", "大树上", "老鼠", "بوم", "الشجرة", "الفأر"),
    Animal("panda", "🐼", "bamboo hills", "bamboo", "bleat", "black and white",
           "panda", "dağda", "bambu", "熊猫", "竹林里", "竹子", "باندا", "الجبل", "الخيزران"),
)  # fmt: skip

NAMES = ("Mia", "Tom", "Lily", "Ben", "Zoe", "Max", "Anna", "Leo", "Ella", "Sam")
TURKISH_NAMES = ("Elif", "Can", "Deniz", "Işıl", "Çağla", "Ömer")
CHINESE_NAMES = ("小明", "小红", "乐乐", "美美", "豆豆")
ARABIC_NAMES = ("سامي", "نور", "كريم", "عمر", "جميل")

THINGS = ("ball", "kite", "drum", "hat", "boat", "lamp", "book", "key")
COLORS = ("red", "blue", "green", "yellow", "purple", "silver")
PLACES = ("forest", "lake", "hill", "beach", "garden", "village")
SPOTS = ("big tree", "old bridge", "tall grass", "wooden box", "gray stone", "garden gate")
FOODS = ("apple pie", "warm soup", "honey cake", "sweet berries", "fresh bread")
TIMES = ("morning", "sunny day", "windy day", "evening", "winter night")
WEATHERS = ("rain", "snow", "wind", "thunder")
FEELINGS = ("happy", "proud", "brave", "calm")

QUESTIONS = (
    (
        "What color is the sky?",
        "The sky is blue in the day and dark at night. When the sun goes down, it turns red.",
    ),
    ("Why do we sleep?", "We sleep so that our body can rest. After a good night, we feel strong and happy."),
    (
        "What is rain?",
        "Rain is water that falls from the clouds. It helps the trees and the flowers to grow.",
    ),
    (
        "How many days are in a week?",
        "There are seven days in a week. Monday is the first and Sunday is the last.",
    ),
    ("Who are you?", "I am a tiny model. I can tell short stories about animals and answer easy questions."),
    (
        "What is the moon?",
        "The moon is a big ball of stone. It goes around the earth and shines at night. 🌙",
    ),
    (
        "How do I make a friend?",
        "Say hello, smile and listen. Share your toys, and soon you will have a friend.",
    ),
    ("What is snow?", "Snow is frozen water. It falls in winter and makes the hills white. ❄️"),
)
GREETINGS = (
    ("Hello!", "Hello! How nice to see you. Do you want to hear a story today?"),
    ("Hi", "Hi there! I am glad you came. Ask me about an animal, or ask me for a story."),
    ("Good night", "Good night! Sleep well, and dream of the stars and the silver moon. 🌙⭐"),
    ("Thank you!", "You are welcome! It was fun to help you. Come back soon. 😊"),
    ("Merhaba!", "Merhaba! Seni görmek çok güzel. Bugün bir masal dinlemek ister misin?"),
    ("Teşekkürler", "Rica ederim! Sana yardım etmek çok güzeldi. Yine gel. 😊"),
    ("你好！", "你好！很高兴见到你。今天你想听一个故事吗？"),
    ("谢谢", "不客气！很高兴帮助你。下次再来吧。😊"),
    ("مرحبا!", "مرحبا! أنا سعيد برؤيتك. هل تريد أن تسمع قصة اليوم؟"),
    ("شكرا", "على الرحب والسعة! كنت سعيدا بمساعدتك. 😊"),
    ("👋", "👋😊 Hello! Do you want a story about a 🦊 or a 🐻?"),
)
SYSTEM_PROMPTS = (
    "You are a kind helper.",
    "You tell short stories to children.",
    "Answer in simple words.",
    "You are a tiny model that loves animals.",
)
